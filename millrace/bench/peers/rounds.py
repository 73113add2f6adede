"""Runs a comparison: every engine in turn, round after round, so that a slow phase of the machine affects all.

Each turn of a round sends the same requests: lengths are fixed, contents depend on seed and round. An engine that fails
is reported and dropped; the others continue. Every wait has a bound.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from millrace.bench.errors import BenchError
from millrace.bench.figures import Figure
from millrace.bench.http.drive import Outcome, drive, warm_up
from millrace.bench.http.prompts import PromptMaker
from millrace.bench.http.suite import about_server, perplexity_figure
from millrace.bench.http.target import Target
from millrace.bench.http.workload_figures import figures_of
from millrace.bench.http.workloads import Workload
from millrace.bench.peers.compared_engine import ComparedEngine, CpuWatch

BUSY_PERCENT = 3.0
"""Percent of one core: an idle engine that uses this much is reported, since it disturbs the measurement."""
OTHERS_PERCENT = 15.0
"""Percent of one core: unrelated processes that use this much are reported."""
_PROBE_TIMEOUT_S = 120.0

Costs = Mapping[str, float]
"""Seconds per workload, over all engines, in the last round."""


@dataclass(frozen=True, slots=True)
class RoundOptions:
    workloads: tuple[Workload, ...]
    rounds: int
    seed: int
    time_limit_s: float
    """Per workload and turn."""
    budget_s: float
    """For the whole comparison: a workload that would not fit is not started."""
    perplexity: bool = True


@dataclass(slots=True)
class Listener:
    """Callbacks of a comparison. Rounds count from 1; round 0 is the start."""

    figure: Callable[[str, int, Figure], None]
    progress: Callable[[str, int, int], None]
    problem: Callable[[str, str], None]


@dataclass(slots=True)
class Comparison:
    engines: list[ComparedEngine]
    options: RoundOptions
    listener: Listener
    order: list[tuple[int, str]] = field(default_factory=list)
    """The turns taken, as round and name."""
    _costs: dict[str, float] = field(default_factory=dict)
    _warned: set[tuple[str, str]] = field(default_factory=set)

    async def run(self) -> None:
        started = time.monotonic()
        try:
            await self._open_all()
            for number in range(1, self.options.rounds + 1):
                left_s = self.options.budget_s - (time.monotonic() - started)
                chosen = workloads_that_fit(self.options.workloads, self._costs, left_s)
                if (number > 1 and not chosen) or not self.engines:
                    break
                await self._round(number, chosen)
        finally:
            for engine in self.engines:
                await engine.close()

    async def _open_all(self) -> None:
        for engine in list(self.engines):
            self.listener.progress(f"{engine.name}: starting", 0, 1)
            try:
                for figure in await engine.open():
                    self.listener.figure(engine.name, 0, figure)
            except (BenchError, TimeoutError) as error:
                await self._drop(engine, error)

    async def _round(self, number: int, chosen: Sequence[Workload]) -> None:
        costs: dict[str, float] = {}
        for engine in list(self.engines):
            self.order.append((number, engine.name))
            others = [other for other in self.engines if other is not engine]
            try:
                await engine.begin_turn()
                watch = CpuWatch(engine, others)
                await self._turn(engine, number, chosen, costs)
                engine.check_alive()
                self._warn_of_others(watch, number, engine.name)
                await engine.end_turn()
            except (BenchError, TimeoutError) as error:
                await self._drop(engine, await engine.cause_of(error))
        self._costs = {**self._costs, **costs}

    async def _turn(
        self, engine: ComparedEngine, number: int, chosen: Sequence[Workload], costs: dict[str, float]
    ) -> None:
        async with engine.target() as target:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                prompts = await target.probe(self.options.seed + number - 1)
                await warm_up(target, prompts)
            if number == 1:
                for figure in about_server(target, prompts):
                    self.listener.problem(engine.name, f"{figure.metric} {figure.note}")
            for workload in chosen:
                if not engine.workloads or workload.name in engine.workloads:
                    outcome = await self._drive(engine.name, number, target, workload, prompts)
                    costs[workload.name] = costs.get(workload.name, 0.0) + outcome.wall_s
            if number == 1 and self.options.perplexity:
                await self._perplexity(engine.name, target)

    async def _drive(self, name: str, number: int, target: Target, workload: Workload, prompts: PromptMaker) -> Outcome:
        def on_done(done: int, total: int) -> None:
            what = f"round {number} of {self.options.rounds}: {name}, {workload.name}"
            self.listener.progress(what, done, total)

        on_done(0, len(workload.shapes))
        outcome = await drive(target, workload, prompts, time_limit_s=self.options.time_limit_s, on_done=on_done)
        for figure in figures_of(outcome):
            self._report(name, number, figure)
        return outcome

    async def _perplexity(self, name: str, target: Target) -> None:
        def progress(what: str, done: int, total: int) -> None:
            self.listener.progress(f"round 1 of {self.options.rounds}: {name}, {what}", done, total)

        progress("perplexity", 0, 1)
        self._report(name, 1, await perplexity_figure(target, self.options.time_limit_s, progress))

    def _report(self, name: str, number: int, figure: Figure) -> None:
        self.listener.figure(name, number, figure)
        if figure.note:
            self.listener.problem(name, f"{figure.workload}: {figure.note}")

    def _warn_of_others(self, watch: CpuWatch, number: int, measured: str) -> None:
        for name, percent in watch.busy(BUSY_PERCENT):
            if (name, measured) not in self._warned:
                self._warned.add((name, measured))
                self.listener.problem(
                    name,
                    f"used {percent:.0f}% of a core while {measured} was measured, so those figures are too low."
                    " Let the benchmark start it, or stop it while others are measured.",
                )
        others_percent = watch.other_processes_percent()
        if others_percent is not None:
            self.listener.figure(measured, number, Figure("machine", "used by others", others_percent, "% of a core"))
            if others_percent >= OTHERS_PERCENT:
                self.listener.problem(
                    measured,
                    f"round {number} is unreliable: other processes used {others_percent:.0f}% of a core.",
                )

    async def _drop(self, engine: ComparedEngine, error: BaseException) -> None:
        said = str(error) or f"no answer within {_PROBE_TIMEOUT_S:g} s"
        self.listener.problem(engine.name, f"dropped: {said}")
        self.engines.remove(engine)
        await engine.close()


def workloads_that_fit(workloads: Sequence[Workload], costs: Costs, left_s: float) -> list[Workload]:
    """The workloads of the next round that fit into the remaining time, for all engines together.

    The first round has no costs yet and takes all, so that every figure is measured once.
    """
    if not costs:
        return list(workloads)
    chosen = []
    for workload in workloads:
        cost = costs.get(workload.name, 0.0)
        if cost <= left_s:
            chosen.append(workload)
            left_s -= cost
    return chosen
