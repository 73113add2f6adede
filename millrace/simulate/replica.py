"""One engine: the scheduler and the cycle, told of requests by number and listened to. With a priced runner and a
virtual clock it is a simulation; with a real runner and the real clock it is the engine to compare with."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from millrace.engine.cycle import Confirmed, Cycle
from millrace.engine.figures.rates import MeasuredRates
from millrace.engine.steps.repeated import RepeatingRunner
from millrace.plan.request import Request
from millrace.plan.scheduler import Scheduler, SchedulerSettings
from millrace.plan.shapes.choice import ShapeChoice
from millrace.plan.step import Ended, Int64s, StepPlan
from millrace.run.facts import RunnerFacts
from millrace.run.protocol import AnyRunner
from millrace.simulate.requests import END_TOKEN, FIRST_TOKEN, VOCABULARY, SimulatedRequest

BLOCKED_WAIT_S = 0.05
"""Pause when there is work but no step can be planned, as in the engine's loop."""
REPORT_EVERY_S = 0.25
SAMPLES_EVERY_S = 1.0


@dataclass(slots=True)
class Life:
    """What became of a request. Times on the replica's clock; NaN for what did not happen."""

    number: int
    request: SimulatedRequest
    replica: int = 0
    admitted_at: float = math.nan
    first_at: float = math.nan
    last_at: float = math.nan
    ended_at: float = math.nan
    reason: str = ""
    message: str = ""
    num_output: int = 0
    cached_tokens: int = 0
    preemptions: int = 0

    def followed_by(self, later: Life) -> Life:
        """The same request, which another replica went on with."""
        return replace(
            self,
            replica=later.replica,
            first_at=later.first_at if math.isnan(self.first_at) else self.first_at,
            last_at=later.last_at,
            ended_at=later.ended_at,
            reason=later.reason,
            message=later.message,
            num_output=self.num_output + later.num_output,
            preemptions=self.preemptions + later.preemptions,
        )


@dataclass(slots=True)
class Timeline:
    """Samples about once per second."""

    at: list[float] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    kv_share: list[float] = field(default_factory=list)


class Replica:
    def __init__(
        self,
        settings: SchedulerSettings,
        runner: AnyRunner,
        facts: RunnerFacts,
        *,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
        shapes: ShapeChoice | None = None,
        max_context: int,
        max_tokens: int = 0,
        deadline_s: float = 0.0,
        on_submit: Callable[[int, int], None] = lambda number, num_output: None,
        on_step: Callable[[Confirmed], None] = lambda done: None,
        vocab_size: int = FIRST_TOKEN + VOCABULARY,
        index: int = 0,
        repeating: RepeatingRunner | None = None,
    ) -> None:
        """`max_tokens`, `deadline_s`: see `SimulationSettings`. `on_submit` is told how many tokens a request will
        generate, before the runner sees it. `repeating`: the runner, if it takes many repeated steps at once."""
        self.index, self._repeating = index, repeating
        self.scheduler = Scheduler(settings, shapes)
        self._clock, self._sleep = clock, sleep
        self._cycle = Cycle(self.scheduler, runner, self, facts=facts, clock=clock, probe=lambda: None, sleep=sleep)
        self._max_context, self._max_tokens, self._deadline_s = max_context, max_tokens, deadline_s
        self._on_submit, self._on_step, self._vocab_size = on_submit, on_step, vocab_size
        self._rates = MeasuredRates()
        self._reported_at = self._sampled_at = -math.inf
        self.lives: dict[int, Life] = {}
        self.num_steps = self.step_tokens = self.num_output = 0
        self.timeline = Timeline()
        self.is_dead = False
        self._ended_since: list[int] = []
        self._last_at = np.zeros(1024)
        """By request: when its last token came."""
        self._gaps: list[tuple[Int64s, np.ndarray[tuple[int], np.dtype[np.float64]]]] = []

    @property
    def now(self) -> float:
        return self._clock()

    @property
    def host_s(self) -> float:
        """Host time of all steps: planning, launching, bookkeeping."""
        times = self._cycle.times
        return times.plan_s + times.launch_s + times.apply_s

    @property
    def device_s(self) -> float:
        return self._cycle.times.device_s

    def submit(self, number: int, request: SimulatedRequest) -> None:
        life = self.lives[number] = Life(number, request, self.index)
        if request.num_prompt + 1 > self._max_context:
            message = f"The prompt has {request.num_prompt} tokens; the context has room for {self._max_context}."
            life.reason, life.message, life.ended_at = "error", message, self._clock()
            self._ended_since.append(number)
            return
        room = self._max_context - request.num_prompt
        num_output = min(request.num_output, room)
        self._on_submit(number, num_output)
        while number >= len(self._last_at):
            self._last_at = np.concatenate([self._last_at, np.zeros_like(self._last_at)])
        self._rates.on_arrival(request.priority)
        self.scheduler.submit(
            Request(
                id=number,
                prompt=request.prompt(number) % self._vocab_size,
                max_tokens=min(max(self._max_tokens, num_output), room),
                end_token_ids=(END_TOKEN,) if self._max_tokens else (),
                priority=request.priority,
                tenant=request.tenant,
                arrival=request.at_s,
                deadline=request.at_s + self._deadline_s if self._deadline_s else math.inf,
            )
        )

    def run_until(self, until: float) -> None:
        """Steps, one after the other, until this time or until nothing is left to do. The last one may end later."""
        while self._clock() < until and (self.scheduler.has_work or self._cycle.num_launched):
            if self._repeat(until):
                continue
            if not self._cycle.advance():
                wait_s = min(BLOCKED_WAIT_S, self._cycle.look_again_s or BLOCKED_WAIT_S)
                self._sleep(min(wait_s, until - self._clock()))

    def warm_next(self) -> bool:
        """Compiles a kernel or captures a graph. False if nothing is left."""
        return self._cycle.warm_next()

    def take_ended(self) -> list[int]:
        """Requests that ended since the last call."""
        ended, self._ended_since = self._ended_since, []
        return ended

    def kill(self) -> list[tuple[int, SimulatedRequest]]:
        """Ends everything. Returns the open requests with what is left of them: tokens that clients have are part of
        their prompts."""
        self.is_dead = True
        open_ids = [number for number, life in self.lives.items() if math.isnan(life.ended_at)]
        for number in open_ids:
            self.scheduler.abort(number)
        self._end(self.scheduler.take_ended(), self._clock())
        left = []
        for number in open_ids:
            life = self.lives[number]
            life.last_at, done = (float(self._last_at[number]) if life.num_output else math.nan), life.num_output
            request = life.request
            rest = replace(request, num_prompt=request.num_prompt + done, num_output=request.num_output - done)
            left.append((number, rest))
        return left

    def _repeat(self, until: float) -> bool:
        """Turns that only repeat each other, up to the next sample."""
        if self._repeating is None:
            return False
        due = min(until, self._sampled_at + SAMPLES_EVERY_S)
        if self.scheduler.tiers.host is not None:
            due = min(due, self._reported_at + REPORT_EVERY_S)
        turns = self._cycle.advance_repeated(self.scheduler, self._repeating, due)
        if turns is None:
            return False
        ids, at, num_rows = turns.request_ids, np.array(turns.ended_at), len(turns.request_ids)
        gaps = np.diff(at, prepend=0.0)[:, None].repeat(num_rows, axis=1)
        gaps[0] = at[0] - self._last_at[ids]
        self._gaps.append((np.tile(ids, len(at)), gaps.ravel()))
        self._last_at[ids] = at[-1]
        self.num_steps += len(at)
        self.num_output += num_rows * len(at)
        self.step_tokens += num_rows * len(at)
        self._rates.on_steps(num_rows, turns.device_s)
        self._report(turns.ended_at[-1])
        return True

    def gaps(self) -> dict[int, list[float]]:
        """By request: seconds between the arrivals of its tokens, step by step."""
        if not self._gaps:
            return {}
        ids = np.concatenate([ids for ids, _ in self._gaps])
        gaps = np.concatenate([gaps for _, gaps in self._gaps])
        order = np.argsort(ids, kind="stable")
        ids, gaps = ids[order], gaps[order]
        found, firsts = np.unique(ids, return_index=True)
        parts = np.split(gaps, firsts[1:])
        return {number: part.tolist() for number, part in zip(found.tolist(), parts, strict=True)}

    # -- told by the cycle -----------------------------------------------------------------------------------------

    def on_launched(self, plan: StepPlan, now: float) -> None:
        self._rates.on_admitted(len(plan.admitted))
        for admission in plan.admitted:
            life = self.lives[admission.request_id]
            if math.isnan(life.admitted_at):
                life.admitted_at = now

    def on_tokens(self, done: Confirmed) -> None:
        outcome, at = done.outcome, done.at
        ids = outcome.request_ids
        self.num_output += len(ids)
        if done.plan.draft_places is not None and len(ids):
            ids = ids[np.concatenate([[True], ids[1:] != ids[:-1]])]  # Tokens of a step arrive together.
        if len(outcome.first_ids):
            for number in outcome.first_ids.tolist():
                self.lives[number].first_at = at
            later = ids[~np.isin(ids, outcome.first_ids)]
        else:
            later = ids
        if len(later):
            self._gaps.append((later, at - self._last_at[later]))
        self._last_at[ids] = at
        self._end(outcome.ended, at)

    def on_step_done(self, done: Confirmed) -> None:
        self.num_steps += 1
        self._on_step(done)
        num_tokens = done.plan.num_tokens
        self.step_tokens += num_tokens
        self._rates.on_step(num_tokens, done.device_s)
        self._report(done.at)

    def _report(self, at: float) -> None:
        if at - self._reported_at >= REPORT_EVERY_S:
            self._reported_at = at
            if self.scheduler.tiers.host is not None:
                self.scheduler.tiers.host.prefill_tokens_per_s = self._rates.tokens_per_s
        if at - self._sampled_at >= SAMPLES_EVERY_S:
            self._sampled_at = at
            self._sample(at)

    def on_ended(self, ended: tuple[Ended, ...], now: float) -> None:
        self._end(ended, now)

    def _end(self, ended: tuple[Ended, ...], at: float) -> None:
        for event in ended:
            life = self.lives[event.request_id]
            self._ended_since.append(event.request_id)
            life.reason, life.message, life.ended_at = event.reason, event.message, at
            life.num_output, life.cached_tokens = event.num_output, event.cached_tokens
            life.preemptions = event.preemptions

    def _sample(self, at: float) -> None:
        pool, timeline = self.scheduler.pool, self.timeline
        timeline.at.append(at)
        timeline.running.append(self.scheduler.num_running)
        timeline.waiting.append(len(self.scheduler.waiting))
        timeline.kv_share.append(1 - pool.num_available / pool.total)
