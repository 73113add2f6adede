"""A whole simulation: replicas with priced steps, requests that arrive in order of time, and a router between."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from millrace.load.records import Outcome, Record
from millrace.observe.slo.objective import Objective
from millrace.simulate.clock import VirtualClock
from millrace.simulate.priced_runner import PricedRunner
from millrace.simulate.profile import Profile
from millrace.simulate.replica import Life, Replica, Timeline
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
) -> Simulated:
    """Equal arguments give equal results, bit for bit."""
    settings.check()
    if settings.classes:
        shares = [float(part) for part in settings.classes.split(":")]
        requests = with_classes(requests, (shares[0], shares[1], shares[2]), seed)
    fleet = Fleet(settings.priced(profile), settings, seed)
    faults = [settings.fault_at] if settings.fault_at else []
    for number, request in enumerate(requests):
        while faults and faults[0] <= request.at_s:
            fleet.kill(faults.pop(0))
        fleet.run_until(request.at_s)
        fleet.submit(number, request, request.at_s)
    for at_s in faults:
        fleet.kill(at_s)
    fleet.run_until(math.inf)
    return collect(fleet.all_replicas, fleet.runners, objectives)


class Fleet:
    """Replicas on clocks of their own, and the router before them."""

    def __init__(self, profile: Profile, settings: SimulationSettings, seed: int) -> None:
        self._profile, self._settings, self._seed = profile, settings, seed
        self.all_replicas: list[Replica] = []
        """Those that died included."""
        self.runners: list[PricedRunner] = []
        self._replicas: list[Replica] = []
        self._clocks: list[VirtualClock] = []
        self._back_at = [0.0] * settings.replicas
        for index in range(settings.replicas):
            self._start(index)
        limit = settings.max_tokens
        self._router = Router(settings.routing, settings.replicas, limit=limit, seed=seed)

    def _start(self, index: int) -> None:
        made = _make_replica(self._profile, self._settings, index, self._seed)
        replica, clock, runner = made
        self._replicas[index : index + 1], self._clocks[index : index + 1] = [replica], [clock]
        self.all_replicas.append(replica)
        self.runners.append(runner)

    def run_until(self, at_s: float) -> None:
        for replica in self._replicas:
            replica.run_until(at_s)
            for number in replica.take_ended():
                self._router.ended(number, replica.index)

    def submit(self, number: int, request: SimulatedRequest, at_s: float) -> None:
        chosen = 0
        if len(self._replicas) > 1:
            able = [index for index, back_at in enumerate(self._back_at) if back_at <= at_s]
            chosen = self._router.choose(number, request, able)
        self._clocks[chosen].advance_to(at_s)
        self._replicas[chosen].submit(number, request)

    def kill(self, at_s: float) -> None:
        """The first replica dies. What it was answering goes on elsewhere, and a new one starts in its place."""
        self.run_until(at_s)
        left = self._replicas[0].kill()
        self._router.lost(0)
        self._start(0)
        self._back_at[0] = at_s + self._settings.fault_s
        self._clocks[0].advance_to(self._back_at[0])
        for number, request in left:
            self.submit(number, request, at_s)


def _make_replica(
    profile: Profile, settings: SimulationSettings, index: int, seed: int
) -> tuple[Replica, VirtualClock, PricedRunner]:
    clock, scheduler = VirtualClock(), settings.scheduler(profile)
    runner = PricedRunner(
        profile,
        clock,
        max_rows=scheduler.max_running,
        block_bytes=scheduler.host_tier.block_bytes,
        acceptance=settings.acceptance,
        has_noise=settings.noise,
        seed=seed * 1009 + index,
    )
    replica = Replica(
        scheduler,
        runner,
        profile.facts(),
        clock=clock,
        sleep=clock.sleep,
        max_context=min(profile.max_context, scheduler.num_blocks * scheduler.block_size),
        max_tokens=settings.max_tokens,
        deadline_s=settings.deadline_s,
        on_submit=runner.num_output.__setitem__,
        index=index,
        repeating=runner,
    )
    return replica, clock, runner


def collect(
    replicas: Sequence[Replica], runners: Sequence[PricedRunner], objectives: tuple[Objective, ...]
) -> Simulated:
    lives, gaps = _lives(replicas)
    records = [_record(life, gaps.get(life.number, [])) for life in lives]
    seconds = max((life.ended_at for life in lives), default=0.0)
    device_s = sum(replica.device_s for replica in replicas)
    counts = EngineCounts(
        steps=sum(replica.num_steps for replica in replicas),
        step_tokens=sum(replica.step_tokens for replica in replicas),
        device_s=device_s,
        busy_share=device_s / max(1e-9, sum(replica.now for replica in replicas)),
        prompt_tokens=sum(life.request.num_prompt for life in lives if life.reason != "error"),
        cached_tokens=sum(life.cached_tokens for life in lives),
        preemptions=sum(replica.scheduler.num_preemptions for replica in replicas),
        yields=sum(replica.scheduler.num_yields for replica in replicas),
        loaded_tokens=sum(tier.tokens_loaded for replica in replicas if (tier := replica.scheduler.host_tier)),
        drafts=sum(runner.num_drafts for runner in runners),
        accepted=sum(runner.num_accepted for runner in runners),
        outside_share=sum(runner.outside_s for runner in runners) / max(1e-9, device_s),
    )
    timelines = [replica.timeline for replica in replicas]
    return Simulated(lives, Outcome(records, max(seconds, 1e-9), objectives), counts, timelines)


def _lives(replicas: Sequence[Replica]) -> tuple[list[Life], dict[int, list[float]]]:
    """By request, also of those that moved from a replica to another; and the gaps between their tokens."""
    lives: dict[int, Life] = {}
    gaps: dict[int, list[float]] = {}
    for replica in sorted(replicas, key=lambda one: one.is_dead, reverse=True):
        own = replica.gaps()
        for number, life in replica.lives.items():
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
