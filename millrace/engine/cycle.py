"""The cycle: plan the next step while earlier ones are in flight, launch it, confirm the oldest.

It knows no channel and no clock of its own: time, runner and masks are given, and what happens is told to a listener.
So a simulator can drive the same cycle with priced steps.

A step is launched in two parts. Its forward pass starts at once; its draw follows, see `steps/draws.py`.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from millrace.engine.copies import BlockCopying, Copier
from millrace.engine.steps.culprit import Culprit, find_culprit
from millrace.engine.steps.draws import Draws, Launched, MaskSource
from millrace.engine.steps.repeated import MAX_DEPTH, RepeatedTurns, RepeatingRunner, TurnClock
from millrace.plan.planner.protocol import ChosenRows, Planner, RepeatingPlanner
from millrace.plan.step import Ended, StepOutcome, StepPlan
from millrace.run.facts import RunnerFacts
from millrace.run.protocol import AnyRunner, StepResult

log = logging.getLogger(__name__)


class Listener(Protocol):
    """Told of everything that happens in a cycle, in order."""

    def on_launched(self, plan: StepPlan, now: float) -> None: ...

    def on_tokens(self, done: Confirmed) -> None:
        """A step completed. Clients wait for its tokens, so this comes before the bookkeeping."""

    def on_step_done(self, done: Confirmed) -> None:
        """The bookkeeping of the step is done: rows of ended requests are free."""

    def on_ended(self, ended: tuple[Ended, ...], now: float) -> None:
        """Requests ended outside a step."""


@dataclass(slots=True)  # Never modified, but a frozen dataclass takes several times as long to create.
class Confirmed:
    """A completed step and what it gave."""

    plan: StepPlan
    result: StepResult
    outcome: StepOutcome
    launched_at: float
    at: float
    """When its tokens were on the host."""
    device_s: float
    """How long it occupied the device: steps overlap, and a step begins when the one before has ended."""


@dataclass(slots=True)
class Times:
    """Seconds, summed over all cycles."""

    step_s: float = 0.0
    """From launch to confirmation."""
    plan_s: float = 0.0
    """Spent in the scheduler, before launches and after results."""
    launch_s: float = 0.0
    """Spent on launching forward passes."""
    device_s: float = 0.0
    """For which steps occupied the device."""
    apply_s: float = 0.0
    """From a step's result to the end of its bookkeeping, sending included."""
    waited_s: float = 0.0
    """Spent waiting for the device."""


class Cycle:
    def __init__(
        self,
        scheduler: Planner,
        runner: AnyRunner,
        listener: Listener,
        *,
        facts: RunnerFacts,
        clock: Callable[[], float],
        probe: Callable[[], None],
        masks: MaskSource | None = None,
        sleep: Callable[[float], None] = time.sleep,
        copier: Copier | None = None,
    ) -> None:
        """`facts`: the runner's. `copier`: by default the runner. `probe` raises if the device itself is unusable.
        `sleep` passes seconds of `clock`."""
        self._scheduler, self._runner, self._listener = scheduler, runner, listener
        self._facts, self._clock, self._probe = facts, clock, probe
        self._draws = Draws(runner, masks, append=scheduler.append_forced, facts=facts, clock=clock)
        self._launched: deque[Launched] = deque()
        self._copying = BlockCopying(scheduler, copier or runner, clock, sleep)
        self._confirmed_at = 0.0
        self._last_device_s = 0.0
        self._planner = ThreadPoolExecutor(1, thread_name_prefix="plan")
        """Chooses the rows of a step while this thread waits for masks. It starts with the first such step."""
        self.times = Times()

    @property
    def num_launched(self) -> int:
        return len(self._launched)

    @property
    def last_device_s(self) -> float:
        """How long the last completed step occupied the device; 0 before the first."""
        return self._last_device_s

    @property
    def look_again_s(self) -> float | None:
        """When to look for copies that have ended; None if there are none."""
        return self._copying.look_again_s

    def settle(self, wait_s: float) -> None:
        """No step will run any more: until then, move blocks to where they outlive the process."""
        if not self._launched:
            self._copying.settle(wait_s)

    @property
    def num_jumped(self) -> int:
        """Tokens that were appended without a draw."""
        return self._draws.num_jumped

    @property
    def oldest(self) -> tuple[StepPlan, float] | None:
        """The oldest step in flight and when it was launched. May be called from another thread."""
        try:
            launched = self._launched[0]
        except IndexError:
            return None
        return launched.plan, launched.at

    def advance(self) -> bool:
        """One turn: launch a step if possible, and confirm the oldest if enough are in flight. False if there was
        nothing to do."""
        if self._copying:
            self._copying.acknowledge()
        depth = 1 if self._last_device_s >= self._facts.slow_step_s else self._facts.steps_in_flight
        launched = len(self._launched) < depth and not self._needs_masks and self._launch_next()
        if self._copying.has_near and not self._launched:  # only copies can make a step possible
            self._copying.acknowledge(wait=True)
            return True
        progressed = launched or bool(self._launched)
        if self._launched and (len(self._launched) >= depth or not launched):
            self._confirm_oldest()
        return progressed

    def advance_repeated(
        self, planner: RepeatingPlanner, runner: RepeatingRunner, until: float
    ) -> RepeatedTurns | None:
        """As many turns as repeat each other, at most up to the first that ends at `until` or later. None if the next
        turn needs a plan of its own. The listener is told nothing of these turns."""
        facts, launched = self._facts, self._launched
        depth = 1 if self._last_device_s >= facts.slow_step_s else facts.steps_in_flight
        if self._copying.has_near or len(launched) != depth - 1 or depth > MAX_DEPTH:
            return None
        if (ahead := planner.repeats_ahead()) is None:
            return None
        last, most = ahead
        oldest = launched[0] if launched else None
        slow_s = facts.slow_step_s if facts.steps_in_flight > 1 else 0.0
        began, pending = (oldest.at, oldest.pending) if oldest is not None else (None, None)
        noted = TurnClock(began, self._confirmed_at, until, slow_s, depth)
        found = runner.repeat(last, most, pending, noted.on_turn)
        if found is None:
            return None
        tokens, pending = found
        turns, outcome = noted.turns, planner.repeat(tokens)
        turns.request_ids = outcome.request_ids
        self._confirmed_at, self._last_device_s = noted.confirmed_at, turns.device_s[-1]
        for launched_at, ended_at, device_s in zip(turns.launched_at, turns.ended_at, turns.device_s, strict=False):
            self.times.step_s += ended_at - launched_at
            self.times.device_s += device_s
        if oldest is not None:
            launched[0] = Launched(outcome.plan, turns.launched_at[-1], oldest.masked_ids, pending)
        planner.observe_repeated(
            replace(outcome.plan, starts=outcome.plan.starts - np.int32(len(launched))), turns.device_s
        )
        return turns

    def warm_next(self) -> bool:
        """Compile a kernel or capture a graph in advance, when idle. False if there is nothing left to warm up."""
        runner, captures = self._runner, self._scheduler.captures
        if not runner.is_built:
            runner.build_next()
            return True
        plan = captures.next()
        if plan is not None and not runner.capture(plan):
            captures.stop()
        return plan is not None

    # -- launch ----------------------------------------------------------------------------------------------------

    @property
    def _needs_masks(self) -> bool:
        """True if the last step launched has no masks yet."""
        return bool(self._launched) and self._launched[-1].needs_masks

    def _launch_next(self) -> bool:
        return self._launch_chosen(self._choose_next())

    def _choose_next(self) -> ChosenRows | None:
        started = self._clock()
        chosen = self._scheduler.choose(started)
        self.times.plan_s += self._clock() - started
        return chosen

    def _launch_chosen(self, chosen: ChosenRows | None) -> bool:
        """The plan is made once, last, with the tokens that grammars force."""
        chosen_at = self._clock()
        plan = None if chosen is None else self._scheduler.compose(chosen, self._draws.forced)
        planned = self._clock()
        self.times.plan_s += planned - chosen_at
        self._tell_ended(planned)
        self._copying.start()
        if plan is None:
            return False
        self._launch(plan, planned)
        launched = self._clock()
        self.times.launch_s += launched - planned
        self._scheduler.run_deferred()
        self.times.plan_s += self._clock() - launched
        return True

    def _launch(self, plan: StepPlan, now: float) -> None:
        rows = plan.rows[:0] if plan.masked is None else plan.rows[plan.masked]
        launched = Launched(plan, now, self._scheduler.rows.request_ids[rows])
        self._launched.append(launched)
        self._runner.forward(plan)
        if plan.masked is None or len(self._launched) == 1:
            self._draws.queue(launched)
        elif plan.draw.waits:
            self._draws.queue_behind_gate(launched)
        self._listener.on_launched(plan, now)

    def _draw_and_launch_next(self, launched: Launched) -> None:
        """Compute the masks of a step, queue its draw if that is not queued, and the step that follows it."""
        if launched.gate is not None:
            look = self._draws.fill(launched)
            self._launch_next()
            look()
        elif self._draws.jumps(launched.plan):
            self._draws.queue(launched)
            self._launch_next()  # It may begin after forced tokens.
        else:
            # Rows are chosen in a thread: computing masks leaves the interpreter to it.
            choosing = self._planner.submit(self._choose_next)
            try:
                self._draws.queue(launched)
            finally:
                chosen = choosing.result()
            self._launch_chosen(chosen)

    def close(self) -> None:
        """No step will be planned any more."""
        for launched in self._launched:
            self._draws.open_gate(launched)

    def _tell_ended(self, now: float) -> None:
        if ended := self._scheduler.take_ended():
            self._listener.on_ended(ended, now)

    # -- confirm ---------------------------------------------------------------------------------------------------

    def _confirm_oldest(self) -> None:
        oldest, times = self._launched[0], self.times
        if oldest.pending is None:
            self._draws.queue(oldest)
        self._scheduler.prepare_outcome()
        wait_began = self._clock()
        assert oldest.pending is not None
        result = oldest.pending.wait()
        self._launched.popleft()
        now = self._clock()
        times.waited_s += now - wait_began
        columns = (result.drawn(), result.counts, result.num_drafts, result.trained)
        outcome = self._scheduler.confirm(oldest.plan.step_no, *columns)
        times.plan_s += self._clock() - now
        if self._scheduler.rows.num_constrained:
            self._draws.consume(outcome)
        device_s = now - max(oldest.at, self._confirmed_at)
        self._confirmed_at, self._last_device_s = now, device_s
        times.step_s += now - oldest.at
        times.device_s += device_s
        done = Confirmed(oldest.plan, result, outcome, oldest.at, now, device_s)
        try:
            if self._needs_masks and len(self._launched) == 1:
                # The device computes its forward pass: queue what follows before sending tokens.
                self._draw_and_launch_next(self._launched[0])
        finally:
            self._listener.on_tokens(done)
        sent = self._clock()
        self._scheduler.run_deferred()
        self._scheduler.observe_step(oldest.plan, device_s)
        times.plan_s += self._clock() - sent
        self._listener.on_step_done(done)
        times.apply_s += self._clock() - now

    # -- when a step fails -----------------------------------------------------------------------------------------

    def recover(self, error: Exception) -> Culprit | None:
        """Discard the steps in flight and run their rows again in halves, until a single row fails.

        Returns the request that caused the failure, if it was found; it is still running and must be ended.
        """
        log.error("a step failed; searching for the request that caused it", exc_info=error)
        self._discard_launched()
        self._probe()
        if self._scheduler.num_in_flight == 0:
            raise error  # No request caused this: the engine itself is broken.
        found = find_culprit(self._scheduler.discard_in_flight(), self._try_rows)
        if found is None:
            return None
        row, failure = found
        return Culprit(int(self._scheduler.rows.request_ids[row]), failure)

    def _discard_launched(self) -> None:
        self.close()
        while self._launched:
            pending = self._launched.popleft().pending
            try:
                if pending is not None:
                    pending.wait()
            except Exception:
                log.debug("a later step failed too", exc_info=True)

    def _try_rows(self, rows: Sequence[int]) -> Exception | None:
        """Run one step with only these rows. Returns the error if it fails."""
        now = self._clock()
        plan = self._scheduler.plan(now, only=rows)
        self._tell_ended(now)
        if plan is None:
            return None
        try:
            self._launch(plan, now)
            self._confirm_oldest()
        except Exception as error:
            self._discard_launched()
            self._probe()
            self._scheduler.discard_in_flight()
            return error
        return None
