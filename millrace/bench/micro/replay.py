"""Runs the steps of a step log again, on a runner made like the one that wrote it, and compares the tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch

from millrace.bench.errors import BenchError
from millrace.bench.figures import Figure
from millrace.config import Config, ModelConfig, PlanConfig, Quantization, RunConfig, Speculation
from millrace.engine.drafting.find import find_drafter
from millrace.models.load import load_decoder
from millrace.plan.step import BlockCopies, CapturePlan, StepInputs, StepPlan
from millrace.run.device.device import Device, open_device
from millrace.run.device.kv_pool import KvFormat
from millrace.run.make import make_runner
from millrace.run.runner import AnyRunner, StepResult
from millrace.run.settings import RunnerSettings
from millrace.run.step_log import LoggedResult, Record, RunnerSetup, read_log, vectors_of
from millrace.sources.resolve import resolve_model


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

    def compare(self, found: StepResult, expected: LoggedResult | None) -> None:
        """`expected`: None of a step that did not end."""
        tokens, vectors = found.drawn(), vectors_of(found)
        self.num_steps += 1
        self.num_tokens += len(tokens)
        if expected is not None:
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
        return replay(records[1:], _make_runner(records[0], device))
    finally:
        device.close()


def replay(records: list[Record], runner: AnyRunner) -> Replay:
    """Steps one after the other, in the order of the log."""
    inputs = {each.step_no: each for each in records if isinstance(each, StepInputs)}
    results = {each.step_no: each for each in records if isinstance(each, LoggedResult)}
    done, began = Replay(), time.perf_counter()
    for record in records:
        if isinstance(record, CapturePlan):
            runner.capture(record)
        if isinstance(record, BlockCopies):
            runner.copy(record).wait()
        if not isinstance(record, StepPlan):
            continue
        own, expected = inputs.get(record.step_no), results.get(record.step_no)
        runner.forward(record, () if own is None else own.drafts)
        found = runner.draw(record, None if own is None or own.masks is None else own).wait()
        done.compare(found, expected)
    done.seconds = time.perf_counter() - began
    return done


def _make_runner(setup: RunnerSetup, device: Device) -> AnyRunner:
    files, speculate = resolve_model(setup.model), msgspec.convert(setup.speculate, Speculation)
    quantization = msgspec.convert(setup.quantization, Quantization)
    decoder = load_decoder(
        files,
        device=device.torch_device,
        dtype=getattr(torch, setup.dtype),
        deterministic=setup.deterministic,
        quantization=quantization,
        seed=setup.seed,
    )
    config = Config(
        model=ModelConfig(source=setup.model, seed=setup.seed),
        plan=PlanConfig(speculate=speculate, drafter=setup.drafter),
        run=RunConfig(deterministic=setup.deterministic),
    )
    drafter = find_drafter(config, files, decoder.spec, quantization)
    return make_runner(
        decoder,
        device,
        RunnerSettings(
            num_blocks=setup.num_blocks,
            block_size=setup.block_size,
            max_rows=setup.max_rows,
            max_context=setup.max_context,
            token_budget=setup.token_budget,
            kv_dtype=msgspec.convert(setup.kv_dtype, KvFormat),
            speculate=speculate,
            host_slots=setup.host_slots,
            max_copied=setup.max_copied,
        ),
        drafter=None if drafter is None else drafter.load(decoder),
    )
