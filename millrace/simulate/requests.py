"""Requests to simulate: from traces, a server's audit log, or generated. Prompts are made of token ids when needed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import numpy as np

from millrace.errors import ConfigError
from millrace.load.arrivals import ArrivalKind, arrival_times
from millrace.load.lengths import Lengths
from millrace.load.sources import TracedRequest, read_trace
from millrace.load.workload import BLOCK_TOKENS
from millrace.params.classes import CLASS_NAMES
from millrace.plan.request import STANDARD
from millrace.plan.step import Int32s

VOCABULARY = 30_000
FIRST_TOKEN = 2
END_TOKEN = 1
_BLOCK_STEP, _OWN_STEP = 7_919, 104_729
"""Primes: token sequences of different blocks, or requests, differ from the first token on."""


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    at_s: float
    num_prompt: int
    num_output: int
    blocks: tuple[int, ...] = ()
    """Ids of its leading blocks of 512 tokens: equal ids are equal tokens."""
    prefix_tokens: int = 0
    """Length of a shared prefix, if it has no blocks; `prefix` names it."""
    prefix: int = 0
    priority: int = STANDARD
    tenant: str = ""

    def prompt(self, number: int) -> Int32s:
        """`number` tells it from other requests."""
        if self.prefix_tokens:
            shared = _tokens(-1 - self.prefix, min(self.prefix_tokens, self.num_prompt - 1), _BLOCK_STEP)
        else:
            # The last block is the request's own, also if it is whole: as in `load.workload`.
            ids = np.array(self.blocks[: min(len(self.blocks) - 1, (self.num_prompt - 1) // BLOCK_TOKENS)], np.int64)
            places = np.arange(BLOCK_TOKENS, dtype=np.int64)
            shared = FIRST_TOKEN + (ids[:, None] * _BLOCK_STEP + places * (ids[:, None] % 97 + 1)).ravel() % VOCABULARY
        own = _tokens(number, self.num_prompt - len(shared), _OWN_STEP)
        return np.concatenate([shared, own]).astype(np.int32)


def _tokens(name: int, count: int, step: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return FIRST_TOKEN + (name * step + np.arange(count, dtype=np.int64) * (name % 101 + 1)) % VOCABULARY


def read_requests(path: Path, speed: float = 1.0, seconds: float = 0.0) -> list[SimulatedRequest]:
    """A trace, or a server's audit log, played `speed` times as fast. `seconds`: of the simulated time; 0 = all."""
    found = _read_audit_log(path) if _is_audit_log(path) else [_traced(one) for one in read_trace(path)]
    if not found:
        raise ConfigError(f"{path} has no requests that were answered.", param="trace")
    found = [replace(one, at_s=one.at_s / speed) for one in found]
    return [one for one in found if not seconds or one.at_s < seconds]


def _traced(one: TracedRequest) -> SimulatedRequest:
    return SimulatedRequest(one.at_s, one.prompt_tokens, one.output_tokens, one.blocks)


def _is_audit_log(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8-sig") as file:
            first = file.readline()
        record = json.loads(first) if first.startswith("{") else {}
    except (OSError, ValueError):
        return False  # `read_trace` says what is wrong.
    return isinstance(record, dict) and "request_id" in record


def _read_audit_log(path: Path) -> list[SimulatedRequest]:
    """Lines are written when requests end; they arrived `seconds` earlier. Prefixes are not in the log, only how many
    tokens of a prompt were cached: the simulated requests share nothing."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            lengths = record.get("prompt_tokens"), record.get("output_tokens")
            if not all(lengths):
                continue
            at_s = datetime.fromisoformat(record["time"]).timestamp() - float(record["seconds"])
            found.append(SimulatedRequest(at_s, int(lengths[0]), int(lengths[1]), tenant=str(record.get("tenant", ""))))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"Line {number} of the audit log {path} cannot be read: {error}.", param="trace"
            ) from error
    found.sort(key=lambda one: one.at_s)
    return [replace(one, at_s=one.at_s - found[0].at_s) for one in found]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    rate: float
    seconds: float
    prompt: Lengths
    output: Lengths
    arrivals: ArrivalKind = "poisson"
    burstiness: float = 1.0
    prefix_tokens: int = 0
    num_prefixes: int = 1
    classes: tuple[float, ...] = (0.0, 1.0, 0.0)
    """Share of each priority class."""
    num_tenants: int = 1
    seed: int = 0

    def requests(self) -> list[SimulatedRequest]:
        rng = np.random.default_rng(self.seed)
        times = arrival_times(self.arrivals, self.rate, self.seconds, rng, self.burstiness)
        shares = np.array(self.classes) / sum(self.classes)
        return [
            SimulatedRequest(
                float(at_s),
                self.prefix_tokens + self.prompt(rng),
                self.output(rng),
                prefix_tokens=self.prefix_tokens,
                prefix=number % self.num_prefixes,
                priority=int(rng.choice(len(CLASS_NAMES), p=shares)),
                tenant=f"tenant-{int(rng.integers(self.num_tenants))}" if self.num_tenants > 1 else "",
            )
            for number, at_s in enumerate(times)
        ]


def with_classes(requests: Sequence[SimulatedRequest], classes: tuple[float, ...], seed: int) -> list[SimulatedRequest]:
    """The requests of a trace, with priority classes drawn by these shares."""
    rng = np.random.default_rng((seed, 1))
    drawn = rng.choice(len(CLASS_NAMES), len(requests), p=np.array(classes) / sum(classes)).tolist()
    return [replace(one, priority=priority) for one, priority in zip(requests, drawn, strict=True)]
