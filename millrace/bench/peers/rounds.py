"""A comparison as a whole: every engine in turn, round after round, so that a slow minute of the machine hits all.

Each turn sends the same requests: lengths are fixed, contents follow from the seed and the round. An engine that fails
is named and left out from there on; the others go on. Every wait has a bound.
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
from millrace.bench.peers.contestant import Contestant, TurnWatch

BUSY_PERCENT = 3.0
"""Of one core: an idle engine that uses this much is named, because it disturbs whoever is measured."""
STRANGERS_PERCENT = 15.0
"""Of one core: processes that are none of the engines and use this much are pointed out."""
_PROBE_WITHIN_S = 120.0

Costs = Mapping[str, float]
"""Seconds that each workload took all engines together in the last round."""


@dataclass(frozen=True, slots=True)
class RoundOptions:
    workloads: tuple[Workload, ...]
    rounds: int
    seed: int
    time_limit_s: float
    """For each workload of each turn."""
    budget_s: float
    """For the whole comparison: no round begins with what would not fit."""
    perplexity: bool = True


@dataclass(slots=True)
class Listener:
    """Who wants to know; rounds are counted from 1, and 0 is the start."""

    figure: Callable[[str, int, Figure], None]
    progress: Callable[[str, int, int], None]
    problem: Callable[[str, str], None]


@dataclass(slots=True)
class Comparison:
    contestants: list[Contestant]
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
                chosen = what_fits(self.options.workloads, self._costs, left_s)
                if (number > 1 and not chosen) or not self.contestants:
                    break
                await self._round(number, chosen)
        finally:
            for contestant in self.contestants:
                await contestant.close()

    async def _open_all(self) -> None:
        for contestant in list(self.contestants):
            self.listener.progress(f"{contestant.name}: starting", 0, 1)
            try:
                for figure in await contestant.open():
                    self.listener.figure(contestant.name, 0, figure)
            except (BenchError, TimeoutError) as error:
                await self._drop(contestant, error)

    async def _round(self, number: int, chosen: Sequence[Workload]) -> None:
        costs: dict[str, float] = {}
        for contestant in list(self.contestants):
            self.order.append((number, contestant.name))
            others = [other for other in self.contestants if other is not contestant]
            try:
                await contestant.begin_turn()
                watch = TurnWatch(contestant, others)
                await self._turn(contestant, number, chosen, costs)
                contestant.check_alive()
                self._warn_of_busy(watch, number, contestant.name)
                await contestant.end_turn()
            except (BenchError, TimeoutError) as error:
                await self._drop(contestant, await contestant.reason_of(error))
        self._costs = {**self._costs, **costs}

    async def _turn(
        self, contestant: Contestant, number: int, chosen: Sequence[Workload], costs: dict[str, float]
    ) -> None:
        async with contestant.target() as target:
            async with asyncio.timeout(_PROBE_WITHIN_S):
                prompts = await target.probe(self.options.seed + number - 1)
                await warm_up(target, prompts)
            if number == 1:
                for figure in about_server(target, prompts):
                    self.listener.problem(contestant.name, f"{figure.metric} {figure.note}")
            for workload in chosen:
                if not contestant.workloads or workload.name in contestant.workloads:
                    outcome = await self._drive(contestant.name, number, target, workload, prompts)
                    costs[workload.name] = costs.get(workload.name, 0.0) + outcome.wall_s
            if number == 1 and self.options.perplexity:
                await self._perplexity(contestant.name, target)

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

    def _warn_of_busy(self, watch: TurnWatch, number: int, measured: str) -> None:
        for name, percent in watch.busy(BUSY_PERCENT):
            if (name, measured) not in self._warned:
                self._warned.add((name, measured))
                self.listener.problem(
                    name,
                    f"used {percent:.0f}% of a core while {measured} was measured; those figures are too low."
                    " Let the benchmark start it, or stop it during the others' turns.",
                )
        strangers = watch.strangers_percent()
        if strangers is not None:
            self.listener.figure(measured, number, Figure("machine", "used by others", strangers, "% of a core"))
            if strangers >= STRANGERS_PERCENT:
                self.listener.problem(
                    measured, f"round {number} is not to be trusted: others used {strangers:.0f}% of a core meanwhile."
                )

    async def _drop(self, contestant: Contestant, error: BaseException) -> None:
        said = str(error) or f"no answer within {_PROBE_WITHIN_S:g} s"
        self.listener.problem(contestant.name, f"left out from here on: {said}")
        self.contestants.remove(contestant)
        await contestant.close()


def what_fits(workloads: Sequence[Workload], costs: Costs, left_s: float) -> list[Workload]:
    """The workloads of the next round, in their order, as far as the time that is left will do for all engines.

    The first round knows no costs and takes all, so that there is a figure for everything.
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
