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
from millrace.simulate.requests import SimulatedRequest
from millrace.simulate.routing import ReplicaLoad, Router, make_router
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
    router: Router | None = None,
) -> Simulated:
    """Equal arguments give equal results, bit for bit. `router`: instead of the settings' own."""
    settings.check()
    made = [_make_replica(profile, settings, index, seed) for index in range(settings.replicas)]
    replicas, clocks = [replica for replica, _, _ in made], [clock for _, clock, _ in made]
    router = router or make_router(settings.routing)
    for number, request in enumerate(requests):
        for replica in replicas:
            replica.run_until(request.at_s)
        chosen = router.choose(request, [load_of(replica) for replica in replicas]) if len(replicas) > 1 else 0
        clocks[chosen].advance_to(request.at_s)
        replicas[chosen].submit(number, request)
    for replica in replicas:
        replica.run_until(math.inf)
    return collect(replicas, [runner for _, _, runner in made], objectives)


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


def load_of(replica: Replica) -> ReplicaLoad:
    scheduler = replica.scheduler
    tokens = sum(scheduler.prefill_tokens()) + sum(scheduler.waiting.tokens.by_class())
    return ReplicaLoad(scheduler.num_running, len(scheduler.waiting), tokens)


def collect(
    replicas: Sequence[Replica], runners: Sequence[PricedRunner], objectives: tuple[Objective, ...]
) -> Simulated:
    lives = sorted((life for replica in replicas for life in replica.lives.values()), key=lambda life: life.number)
    gaps = {number: own for replica in replicas for number, own in replica.gaps().items()}
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
