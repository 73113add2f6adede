"""The cycle: plan the next step while earlier ones are in flight, launch it, confirm the oldest.

It knows no channel and no clock of its own: time, runner and masks are given, and what happens is told to a listener.
So a simulator can drive the same cycle with priced steps.

A step is launched in two parts. Its forward pass starts at once. If a grammar restricts some of its rows, its draw
waits until the tokens of the step before are on the host: the masks depend on them, and computing them hides behind the
forward pass. Where the device itself can wait for masks, the draw is queued with the forward pass.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from millrace.engine.copies import BlockCopying
from millrace.plan.planner import Planner
from millrace.plan.step import Ended, ForcedDrafts, Int32s, Int64s, StepInputs, StepOutcome, StepPlan
from millrace.run.device.device import Pending
from millrace.run.facts import RunnerFacts
from millrace.run.runner import AnyRunner, StepResult
from millrace.run.sampling.masks import MaskedRows, Masks, Uint32s

log = logging.getLogger(__name__)

SLOW_MASKS_S = 0.0006
"""Masks of a step that take longer hold up its draw. Otherwise the forward pass hides them."""
LOOK_EVERY = 16
"""Steps between two searches for long forced text, which take about 0.3 ms: masks may be slow for another reason."""


class MaskSource(Protocol):
    """Which tokens the grammars of running requests allow next."""

    def consume(self, outcome: StepOutcome) -> None:
        """These tokens were drawn. Requests without a grammar are ignored."""

    def masks(self, rows: MaskedRows, bits: Uint32s) -> Masks:
        """The masks of these rows and their drafts, in `bits`. Another thread can run meanwhile."""

    def forced(self, rows: MaskedRows, masks: Masks) -> list[tuple[int, list[int]]]:
        """The requests whose next mask, just computed, allows one token only, each with the tokens that must come.
        Those tokens are remembered: further masks of such a request take no time."""


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


@dataclass(frozen=True, slots=True)
class Culprit:
    """The request whose step fails on its own, and how."""

    request_id: int
    error: Exception


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
    mask_s: float = 0.0
    """Spent on grammar masks."""
    waited_s: float = 0.0
    """Spent waiting for the device."""


@dataclass(slots=True)
class Launched:
    plan: StepPlan
    at: float
    masked_ids: Int64s
    """The requests of its masked rows. Rows change hands when a later step is planned, also in another thread."""
    pending: Pending[StepResult] | None = None
    """None until its draw is queued."""
    awaited: tuple[MaskedRows, Masks] | None = None
    """What its draw, which is queued, waits for."""

    @property
    def needs_masks(self) -> bool:
        return self.pending is None or self.awaited is not None


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
    ) -> None:
        """`facts`: the runner's. `probe` raises if the device itself is unusable."""
        self._scheduler, self._runner, self._listener = scheduler, runner, listener
        self._facts, self._clock, self._probe, self._masks = facts, clock, probe, masks
        self._launched: deque[Launched] = deque()
        self._copying = BlockCopying(scheduler, runner, clock)
        self._confirmed_at = 0.0
        self._forced: dict[int, list[int]] = {}
        """By request: the tokens that its grammar forces after the step that drew masked rows last."""
        self._last_device_s = 0.0
        self._looked_at = 0
        """The step after whose masks forced text was searched for last."""
        self._planner = ThreadPoolExecutor(1, thread_name_prefix="plan")
        """Plans a step while this thread waits for masks. It starts with the first such step."""
        self.num_jumped = 0
        """Tokens that were appended without a draw."""
        self.times = Times()

    @property
    def num_launched(self) -> int:
        return len(self._launched)

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
        if self._copying and not self._launched:  # only copies can make a step possible
            self._copying.acknowledge(wait=True)
            return True
        progressed = launched or bool(self._launched)
        if self._launched and (len(self._launched) >= depth or not launched):
            self._confirm_oldest()
        return progressed

    def warm_next(self) -> bool:
        """Compile a kernel or capture a graph in advance, when idle. False if there is nothing left to warm up."""
        runner, captures = self._runner, self._scheduler.captures
        if not runner.is_built:
            runner.build_next()
            return True
        for head in runner.take_missed():
            captures.want(head)
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
        return self._launch_planned(self._plan_next())

    def _plan_next(self) -> StepPlan | None:
        started = self._clock()
        plan = self._scheduler.plan(started)
        self.times.plan_s += self._clock() - started
        return plan

    def _launch_planned(self, plan: StepPlan | None) -> bool:
        planned = self._clock()
        self._tell_ended(planned)
        self._copying.start()
        if plan is None:
            return False
        self._launch(self._with_forced(plan), planned)
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
            self._draw(launched)
        elif plan.draft_places is None and len(plan.rows) > self._facts.max_jump_rows:
            self._queue_draw(launched)
        self._listener.on_launched(plan, now)

    def _draw(self, launched: Launched) -> None:
        """Queue the draw of a step. All steps before it are confirmed if a grammar restricts one of its rows."""
        plan = launched.plan
        if plan.masked is None or self._masks is None:
            launched.pending = self._runner.draw(plan)
            return
        rows, drafts = self._masked_rows(plan, launched.masked_ids)
        began = self._clock()
        masks = self._masks.masks(rows, self._runner.mask_memory(rows.num_masks))
        self.times.mask_s += self._clock() - began
        launched.pending = self._runner.draw(plan, StepInputs(plan.step_no, masks, drafts))
        # While the device draws: the next step needs it, this draw does not.
        jumps, self._forced = len(plan.rows) <= self._facts.max_jump_rows, {}
        if jumps or (self._facts.takes_forced and plan.draft_places is not None):
            self._use_forced(rows, self._masks.forced(rows, masks), jumps=jumps)

    def _masked_rows(self, plan: StepPlan, request_ids: Int64s) -> tuple[MaskedRows, tuple[Int32s, ...]]:
        """Which rows need masks, and the drafts of all rows that draw."""
        assert plan.masked is not None
        index = np.flatnonzero(plan.masked[plan.samples])
        if plan.draft_places is None or not plan.draft_places.any():
            return MaskedRows(index, request_ids, [[] for _ in request_ids]), ()
        drafts = self._runner.drafts()
        return MaskedRows(index, request_ids, [drafts[at].tolist() for at in index.tolist()]), drafts

    def _queue_draw(self, launched: Launched) -> None:
        """Queue the draw of a step whose masks are not known yet, if the device can wait for them."""
        rows, _ = self._masked_rows(launched.plan, launched.masked_ids)
        masks = rows.masks(self._runner.mask_memory(rows.num_masks))
        launched.awaited = rows, masks
        launched.pending = self._runner.draw_ahead(launched.plan, StepInputs(launched.plan.step_no, masks))
        if launched.pending is None:
            launched.awaited = None

    def _draw_and_launch_next(self, launched: Launched) -> None:
        """Compute the masks of a step, queue its draw if that is not queued, and the step that follows it."""
        if launched.awaited is not None:
            self._fill_and_launch_next(launched, *launched.awaited)
            return
        if len(launched.plan.rows) <= self._facts.max_jump_rows:
            self._draw(launched)
            self._launch_next()  # It may begin after forced tokens.
            return
        # The next step is planned in a thread: computing masks leaves the interpreter to it.
        planned = self._planner.submit(self._plan_next)
        try:
            self._draw(launched)
        finally:
            plan = planned.result()
        self._launch_planned(plan)

    def _fill_and_launch_next(self, launched: Launched, rows: MaskedRows, masks: Masks) -> None:
        assert self._masks is not None
        began = self._clock()
        try:
            self._masks.masks(rows, masks.bits)
        finally:
            self._let_draw(launched)
        mask_s = self._clock() - began
        self.times.mask_s += mask_s
        self._forced = {}
        self._launch_next()
        step_no = launched.plan.step_no
        if mask_s > SLOW_MASKS_S and step_no >= self._looked_at + LOOK_EVERY:
            self._looked_at = step_no
            self._masks.forced(rows, masks)  # Long forced text may be why: its further masks take no time.

    def _let_draw(self, launched: Launched) -> None:
        """Whatever has failed: until this, the device waits, and so does everything queued behind the draw."""
        launched.awaited = None
        self._runner.masks_ready()

    def close(self) -> None:
        """No step will be planned any more."""
        for launched in self._launched:
            if launched.awaited is not None:
                self._let_draw(launched)

    def _use_forced(self, rows: MaskedRows, forced: list[tuple[int, list[int]]], *, jumps: bool) -> None:
        """Rows continue after the tokens that their grammars force, or have them as drafts in the next step. The step
        launched last draws the first of them."""
        drafts = dict(zip(rows.request_ids.tolist(), rows.drafts, strict=True)) if self._facts.takes_forced else {}
        for request_id, tokens in forced:
            num_saved = 0
            if jumps and len(tokens) > self._facts.min_jump:
                num_saved = self._scheduler.append_forced(request_id, tokens)
                self.num_jumped += num_saved
            if not num_saved and self._facts.takes_forced:
                # The step launched last gives as many of them as it has right drafts, and one more.
                self._forced[request_id] = tokens[1 + _num_equal(drafts[request_id], tokens) :]

    def _with_forced(self, plan: StepPlan) -> StepPlan:
        """The plan with the drafts that grammars force."""
        if not self._forced or plan.masked is None or plan.draft_places is None:
            return plan
        has_places = plan.rows[plan.masked & (plan.draft_places > 0)]
        ids = self._scheduler.rows.request_ids[has_places].tolist()
        forced = tuple(
            ForcedDrafts(row, np.array(tokens, np.int32))
            for row, request_id in zip(has_places.tolist(), ids, strict=True)
            if (tokens := self._forced.get(request_id))
        )
        return replace(plan, forced=forced) if forced else plan

    def _tell_ended(self, now: float) -> None:
        if ended := self._scheduler.take_ended():
            self._listener.on_ended(ended, now)

    # -- confirm ---------------------------------------------------------------------------------------------------

    def _confirm_oldest(self) -> None:
        oldest, times = self._launched[0], self.times
        if oldest.pending is None:
            self._draw(oldest)
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
        if self._masks is not None and self._scheduler.rows.num_constrained:
            self._masks.consume(outcome)
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
        suspects = list(self._scheduler.discard_in_flight())
        while suspects:
            half = suspects[: max(1, len(suspects) // 2)]
            failure = self._try_rows(half)
            if failure is None:
                suspects = suspects[len(half) :]
            elif len(half) == 1:
                return Culprit(int(self._scheduler.rows.request_ids[half[0]]), failure)
            else:
                suspects = half
        return None

    def _discard_launched(self) -> None:
        self.close()
        while self._launched:
            pending = self._launched.popleft().pending
            try:
                if pending is not None:
                    pending.wait()
            except Exception:
                log.debug("a later step failed too", exc_info=True)

    def _try_rows(self, rows: list[int]) -> Exception | None:
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


def _num_equal(first: list[int], second: list[int]) -> int:
    """How many tokens both begin with."""
    pairs = zip(first, second, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))
