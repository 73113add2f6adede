"""Runs one workload against one server, with a fixed concurrency and a time limit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from millrace.bench.http.prompts import PromptMaker
from millrace.bench.http.target import Sample, Target
from millrace.bench.http.workloads import RequestShape, Workload


@dataclass(slots=True)
class Outcome:
    workload: Workload
    samples: list[Sample] = field(default_factory=list)
    incomplete: int = 0
    """Requests not completed within the time limit; the figures cover the others."""
    wall_s: float = 0.0

    @property
    def good(self) -> list[Sample]:
        return [sample for sample in self.samples if not sample.error]

    @property
    def errors(self) -> list[str]:
        return [sample.error for sample in self.samples if sample.error]


async def drive(
    target: Target,
    workload: Workload,
    prompts: PromptMaker,
    *,
    time_limit_s: float,
    on_done: Callable[[int, int], None] | None = None,
) -> Outcome:
    """Closed loop: `concurrency` clients, each sending the next request when its last one ends."""
    outcome = Outcome(workload)
    work = [(shape, prompts.make(shape)) for shape in workload.shapes]
    waiting = iter(work)

    async def client() -> None:
        for shape, prompt in waiting:
            outcome.samples.append(await target.complete(prompt, shape.output_tokens))
            if on_done is not None:
                on_done(len(outcome.samples), len(work))

    started = time.monotonic()
    try:
        async with asyncio.timeout(time_limit_s):
            await asyncio.gather(*(client() for _ in range(min(workload.concurrency, len(work)))))
    except TimeoutError:
        pass
    outcome.wall_s = time.monotonic() - started
    outcome.incomplete = len(work) - len(outcome.samples)
    return outcome


async def warm_up(target: Target, prompts: PromptMaker) -> None:
    """One short request, so that lazy initialisation does not count in the first figure."""
    shape = RequestShape("warm-up", 0, 0, 16, 8)
    await target.complete(prompts.make(shape), shape.output_tokens)
