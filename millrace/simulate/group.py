"""Replicas with priced steps, each on a clock of its own. Between two arrivals they know nothing of each other, so
groups of them can run in several processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millrace.simulate.clock import VirtualClock
from millrace.simulate.priced_runner import PricedRunner
from millrace.simulate.profile import Profile
from millrace.simulate.replica import Life, Replica, Timeline
from millrace.simulate.requests import SimulatedRequest
from millrace.simulate.settings import SimulationSettings

Ended = list[tuple[int, int]]
"""Requests that ended since the last call, each with its replica."""
Left = list[tuple[int, SimulatedRequest]]
"""Requests of a replica that died, with what is left of them."""


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What a replica did until its end."""

    index: int
    is_dead: bool
    now: float
    device_s: float
    num_steps: int
    step_tokens: int
    preemptions: int
    yields: int
    loaded_tokens: int
    disk_tokens: int
    drafts: int
    accepted: int
    outside_s: float
    lives: dict[int, Life]
    gaps: dict[int, list[float]]
    timeline: Timeline


def report_of(replica: Replica, runner: PricedRunner | None = None) -> ReplicaReport:
    """`runner`: None if it is real."""
    scheduler = replica.scheduler
    return ReplicaReport(
        index=replica.index,
        is_dead=replica.is_dead,
        now=replica.now,
        device_s=replica.device_s,
        num_steps=replica.num_steps,
        step_tokens=replica.step_tokens,
        preemptions=scheduler.num_preemptions,
        yields=scheduler.num_yields,
        loaded_tokens=scheduler.tiers.host.tokens_loaded if scheduler.tiers.host else 0,
        disk_tokens=scheduler.tiers.disk.tokens_read if scheduler.tiers.disk else 0,
        drafts=runner.num_drafts if runner else 0,
        accepted=runner.num_accepted if runner else 0,
        outside_s=runner.outside_s if runner else 0.0,
        lives=replica.lives,
        gaps=replica.gaps(),
        timeline=replica.timeline,
    )


@dataclass(frozen=True, slots=True)
class _Member:
    replica: Replica
    clock: VirtualClock
    runner: PricedRunner


class ReplicaGroup:
    """The replicas with some of the fleet's numbers."""

    def __init__(self, profile: Profile, settings: SimulationSettings, seed: int, indices: Sequence[int]) -> None:
        self._profile, self._settings, self._seed = profile, settings, seed
        self._members = {index: self._start(index) for index in indices}
        self._dead: list[_Member] = []

    def run_until(self, at_s: float) -> Ended:
        for member in self._members.values():
            member.replica.run_until(at_s)
        return [(number, index) for index, own in self._members.items() for number in own.replica.take_ended()]

    def submit(self, index: int, number: int, request: SimulatedRequest, at_s: float) -> None:
        member = self._members[index]
        member.clock.advance_to(at_s)
        member.replica.submit(number, request)

    def kill(self, index: int, back_at: float) -> Left:
        """The replica dies, and a new one starts in its place."""
        member = self._members[index]
        left = member.replica.kill()
        self._dead.append(member)
        self._members[index] = self._start(index)
        self._members[index].clock.advance_to(back_at)
        return left

    def reports(self) -> list[ReplicaReport]:
        return [report_of(own.replica, own.runner) for own in (*self._dead, *self._members.values())]

    def _start(self, index: int) -> _Member:
        profile, settings, clock = self._profile, self._settings, VirtualClock()
        scheduler = settings.scheduler(profile)
        runner = PricedRunner(
            profile,
            clock,
            max_rows=scheduler.max_running,
            block_bytes=scheduler.host_tier.block_bytes,
            acceptance=settings.acceptance,
            has_noise=settings.noise,
            seed=self._seed * 1009 + index,
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
        return _Member(replica, clock, runner)
