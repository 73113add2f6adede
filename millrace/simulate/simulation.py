"""A whole simulation: replicas with priced steps, requests that arrive in order of time, and a router between."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from millrace.load.records import Outcome, Record
from millrace.observe.slo.objective import Objective
from millrace.simulate.group import ReplicaGroup, ReplicaReport
from millrace.simulate.processes import GroupProcess
from millrace.simulate.profile import Profile
from millrace.simulate.replica import Life, Timeline
from millrace.simulate.requests import SimulatedRequest, with_classes
from millrace.simulate.routing import Router
from millrace.simulate.settings import SimulationSettings


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """Sums over all replicas."""

    steps: int
    step_tokens: int
    device_s: float
    busy_share: float
    """Of the replicas' time, until each ended its last request."""
    prompt_tokens: int
    cached_tokens: int
    preemptions: int
    yields: int
    loaded_tokens: int
    """From host memory."""
    disk_tokens: int
    """Of those, from the disk."""
    drafts: int
    accepted: int
    outside_share: float
    """Share of the device time in steps outside the profile's range."""

    @property
    def hit_share(self) -> float:
        return self.cached_tokens / max(1, self.prompt_tokens)


@dataclass(frozen=True, slots=True)
class Simulated:
    """The result of a run, simulated or real."""

    lives: list[Life]
    outcome: Outcome
    counts: EngineCounts
    timelines: list[Timeline]


def simulate(
    requests: Sequence[SimulatedRequest],
    profile: Profile,
    settings: SimulationSettings,
    *,
    seed: int = 0,
    objectives: tuple[Objective, ...] = (),
    num_processes: int = 1,
) -> Simulated:
    """Equal arguments give equal results, bit for bit, with any number of processes."""
    settings.check()
    if settings.classes:
        shares = [float(part) for part in settings.classes.split(":")]
        requests = with_classes(requests, (shares[0], shares[1], shares[2]), seed)
    fleet = Fleet(settings.priced(profile), settings, seed, min(num_processes, settings.replicas))
    try:
        faults = [settings.fault_at] if settings.fault_at else []
        for number, request in enumerate(requests):
            while faults and faults[0] <= request.at_s:
                fleet.kill(faults.pop(0))
            fleet.run_until(request.at_s)
            fleet.submit(number, request, request.at_s)
        for at_s in faults:
            fleet.kill(at_s)
        fleet.run_until(math.inf)
        return collect(fleet.reports(), objectives)
    finally:
        fleet.close()


class Fleet:
    """Replicas on clocks of their own, in one process or several, and the router before them."""

    def __init__(self, profile: Profile, settings: SimulationSettings, seed: int, num_processes: int) -> None:
        self._settings = settings
        numbers = range(settings.replicas)
        self._here: list[ReplicaGroup] = []
        self.elsewhere: list[GroupProcess] = []
        if num_processes > 1:
            shares = [numbers[part::num_processes] for part in range(num_processes)]
            self.elsewhere = [GroupProcess(profile, settings, seed, share) for share in shares]
        else:
            self._here = [ReplicaGroup(profile, settings, seed, numbers)]
        self._back_at = [0.0] * settings.replicas
        self._router = Router(settings.routing, settings.replicas, limit=settings.max_tokens, seed=seed)

    def run_until(self, at_s: float) -> None:
        for process in self.elsewhere:
            process.ask_until(at_s)
        ended = [one for group in self._here for one in group.run_until(at_s)]
        ended += [one for process in self.elsewhere for one in process.take_ended()]
        for number, index in ended:
            self._router.ended(number, index)

    def submit(self, number: int, request: SimulatedRequest, at_s: float) -> None:
        chosen = 0
        if len(self._back_at) > 1:
            able = [index for index, back_at in enumerate(self._back_at) if back_at <= at_s]
            chosen = self._router.choose(number, request, able)
        self._group_of(chosen).submit(chosen, number, request, at_s)

    def kill(self, at_s: float) -> None:
        """The first replica dies. What it was answering goes on elsewhere, and a new one starts in its place."""
        self.run_until(at_s)
        self._back_at[0] = at_s + self._settings.fault_s
        left = self._group_of(0).kill(0, self._back_at[0])
        self._router.lost(0)
        for number, request in left:
            self.submit(number, request, at_s)

    def reports(self) -> list[ReplicaReport]:
        """Those of replicas that died are among them."""
        groups: list[ReplicaGroup | GroupProcess] = [*self._here, *self.elsewhere]
        return [report for group in groups for report in group.reports()]

    def close(self) -> None:
        for process in self.elsewhere:
            process.close()

    def _group_of(self, index: int) -> ReplicaGroup | GroupProcess:
        groups = self._here or self.elsewhere
        return groups[index % len(groups)]


def collect(reports: Sequence[ReplicaReport], objectives: tuple[Objective, ...]) -> Simulated:
    # A replica that died comes before the one in its place.
    reports = sorted(reports, key=lambda one: (not one.is_dead, one.index))
    lives, gaps = _lives(reports)
    records = [_record(life, gaps.get(life.number, [])) for life in lives]
    seconds = max((life.ended_at for life in lives), default=0.0)
    device_s = sum(one.device_s for one in reports)
    counts = EngineCounts(
        steps=sum(one.num_steps for one in reports),
        step_tokens=sum(one.step_tokens for one in reports),
        device_s=device_s,
        busy_share=device_s / max(1e-9, sum(one.now for one in reports)),
        prompt_tokens=sum(life.request.num_prompt for life in lives if life.reason != "error"),
        cached_tokens=sum(life.cached_tokens for life in lives),
        preemptions=sum(one.preemptions for one in reports),
        yields=sum(one.yields for one in reports),
        loaded_tokens=sum(one.loaded_tokens for one in reports),
        disk_tokens=sum(one.disk_tokens for one in reports),
        drafts=sum(one.drafts for one in reports),
        accepted=sum(one.accepted for one in reports),
        outside_share=sum(one.outside_s for one in reports) / max(1e-9, device_s),
    )
    return Simulated(lives, Outcome(records, max(seconds, 1e-9), objectives), counts, [one.timeline for one in reports])


def _lives(reports: Sequence[ReplicaReport]) -> tuple[list[Life], dict[int, list[float]]]:
    """By request, also of those that moved from a replica to another; and the gaps between their tokens."""
    lives: dict[int, Life] = {}
    gaps: dict[int, list[float]] = {}
    for report in reports:
        own = report.gaps
        for number, life in report.lives.items():
            before = lives.get(number)
            if before is not None and not math.isnan(before.last_at):
                own[number] = [life.first_at - before.last_at, *own.get(number, [])]
            lives[number] = life if before is None else before.followed_by(life)
            gaps.setdefault(number, []).extend(own.get(number, []))
    return [lives[number] for number in sorted(lives)], gaps


def _record(life: Life, gaps_s: list[float]) -> Record:
    at_s = life.request.at_s
    is_answered = life.reason in ("stop", "length")
    return Record(
        number=life.number,
        turn=0,
        intended_s=at_s,
        sent_s=at_s,
        ttft_s=life.first_at - at_s if is_answered else 0.0,
        e2e_s=life.ended_at - at_s,
        gaps_s=gaps_s,
        prompt_tokens=life.request.num_prompt,
        cached_tokens=life.cached_tokens,
        output_tokens=life.num_output,
        error="" if is_answered else (life.message or life.reason),
    )
