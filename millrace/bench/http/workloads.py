"""The workloads: number of requests, their lengths, and concurrency. `prompts.py` makes the content.

Lengths come from a fixed seed, so every run and every engine gets the same work.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

_LENGTH_SEED = 20_240


@dataclass(frozen=True, slots=True)
class RequestShape:
    """Lengths of one request. Requests of the same `group` share their first `shared_tokens` prompt tokens."""

    group: str
    index: int
    shared_tokens: int
    own_tokens: int
    output_tokens: int

    @property
    def prompt_tokens(self) -> int:
        return self.shared_tokens + self.own_tokens


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    what: str
    shapes: tuple[RequestShape, ...]
    concurrency: int

    @property
    def longest(self) -> int:
        """Tokens of context that the largest request needs."""
        return max(shape.prompt_tokens + shape.output_tokens for shape in self.shapes)


def single(repeats: int = 3) -> Workload:
    return _uniform("single", "512 in / 128 out, one at a time", repeats, 512, 128, concurrency=1)


def decode(batch: int) -> Workload:
    return _uniform(f"batch-{batch}", f"256 in / 64 out, {batch} at once", batch, 256, 64, concurrency=batch)


def mixed(requests: int = 64) -> Workload:
    lengths = random.Random(_LENGTH_SEED)
    shapes = [RequestShape("mixed", i, 0, lengths.randint(64, 512), lengths.randint(64, 256)) for i in range(requests)]
    return Workload("mixed", f"{requests} requests, 64–512 in / 64–256 out, 16 at once", tuple(shapes), 16)


def shared_prefix(requests: int = 64) -> Workload:
    shapes = [RequestShape("shared", i, 1024, 32, 32) for i in range(requests)]
    return Workload(
        "shared-prefix", f"{requests} requests, 1,024 shared + 32 own in / 32 out, 8 at once", tuple(shapes), 8
    )


def prefix_cold(repeats: int = 3) -> Workload:
    """New prompts. `prefix_warm` repeats their first 1,024 tokens with other endings."""
    shapes = [RequestShape(f"prefix-{i}", 0, 1024, 32, 8) for i in range(repeats)]
    return Workload("prefix-cold", "1,056 in, never seen before, one at a time", tuple(shapes), 1)


def prefix_warm(repeats: int = 3) -> Workload:
    shapes = [RequestShape(f"prefix-{i}", 1, 1024, 32, 8) for i in range(repeats)]
    return Workload("prefix-warm", "1,056 in, the first 1,024 seen before, one at a time", tuple(shapes), 1)


def suite() -> tuple[Workload, ...]:
    """All workloads in order. prefix-warm must follow prefix-cold."""
    batches = tuple(decode(batch) for batch in (1, 4, 16))
    return (single(), *batches, mixed(), shared_prefix(), prefix_cold(), prefix_warm())


def _uniform(name: str, what: str, count: int, own: int, output: int, *, concurrency: int) -> Workload:
    return Workload(name, what, tuple(RequestShape(name, i, 0, own, output) for i in range(count)), concurrency)
