"""Runs the steps of a step log again, on a runner made like the one that wrote it, and compares the tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from millrace.bench.errors import BenchError
from millrace.bench.figures import Figure
from millrace.config import RunConfig
from millrace.engine.ranks.make import runner_from
from millrace.errors import AdapterError
from millrace.run.device.device import open_device
from millrace.run.protocol import StepResult
from millrace.run.ranks.follower import Follower
from millrace.run.ranks.recorder import LoggedResult, Record, RunnerSetup, vectors_of
from millrace.run.ranks.slot_fills import fill_as_recorded
from millrace.run.runner import Runner
from millrace.run.step_log import read_log

if TYPE_CHECKING:
    from millrace.run.cuda_runner import CudaRunner


@dataclass(slots=True)
class Replay:
    num_steps: int = 0
    num_tokens: int = 0
    num_different: int = 0
    """Steps whose tokens, or number of vectors, differ."""
    num_vectors: int = 0
    """Steps that gave vectors."""
    vector_error: float = 0.0
    """Largest difference of an element of a vector."""
    seconds: float = 0.0

    def compare(self, found: StepResult, expected: LoggedResult) -> None:
        tokens, vectors = found.drawn(), vectors_of(found)
        self.num_steps += 1
        self.num_tokens += len(tokens)
        logged = np.frombuffer(expected.vectors, np.float32)
        is_same_size = len(logged) == len(vectors)
        self.num_different += tokens.tobytes() != expected.tokens or not is_same_size
        if len(vectors) and is_same_size:
            self.num_vectors += 1
            self.vector_error = max(self.vector_error, float(np.abs(vectors - logged).max()))

    def figures(self) -> Iterator[Figure]:
        yield Figure("replay", "steps", self.num_steps, "")
        yield Figure("replay", "tokens drawn", self.num_tokens, "")
        yield Figure("replay", "steps with other tokens", self.num_different, "")
        yield Figure("replay", "largest difference of a vector", self.vector_error, "")
        yield Figure("replay", "time of a step", 1e3 * self.seconds / max(1, self.num_steps), "ms")


def replay_log(file: Path, run: RunConfig) -> Replay:
    try:
        records = read_log(file)
    except (OSError, ValueError) as error:
        raise BenchError(f"The step log {file} cannot be read: {error}") from error
    if not records or not isinstance(records[0], RunnerSetup):
        raise BenchError(f"The step log {file} is empty.")
    device = open_device(run)
    try:
        runner = runner_from(records[0], device)
        if runner.facts.shapes.digest != records[0].shapes:
            raise BenchError(
                f"The steps of {file} have other shapes than those of this machine, so they cannot run here. Run them"
                " on the same kind of device, with the same installation of Millrace."
            )
        return replay(records[1:], runner)
    except AdapterError as error:
        raise BenchError(f"The steps of {file} cannot run again: {error.message}") from error
    finally:
        device.close()


def replay(records: list[Record], runner: Runner | CudaRunner) -> Replay:
    """Steps that ended, in the order of the log."""
    follower = Follower(runner, lambda fill: fill_as_recorded(runner, fill))
    done, began = Replay(), time.perf_counter()
    for record in records:
        followed = follower.take(record)
        if followed is not None:
            if isinstance(followed.found, Exception):
                raise followed.found
            done.compare(followed.found, followed.expected)
    done.seconds = time.perf_counter() - began
    return done
