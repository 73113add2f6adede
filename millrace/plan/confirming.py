"""Confirms steps: first what clients wait for, then the bookkeeping, which may run after the tokens are sent."""

from __future__ import annotations

from dataclasses import dataclass

from millrace.plan.drafts import DraftPlaces
from millrace.plan.in_flight import StepsInFlight
from millrace.plan.outcome import Delivered, DraftedOutcome, PendingOutcome, make_pending_outcome
from millrace.plan.seating import Seating
from millrace.plan.step import Ended, Int32s, Int64s, StepPlan, TrainedDrafts


@dataclass(slots=True)
class _DeferredWork:
    """Bookkeeping of a confirmed step."""

    step_no: int
    outcome: PendingOutcome | DraftedOutcome
    drawn: Int32s
    """Tokens of the outcome's rows."""
    ended: list[tuple[int, Ended]]
    """Rows that ended, with their terminal events."""
    appended: list[tuple[int, Int32s]]
    """Tokens that follow the drawn one, by row."""


class Confirming:
    def __init__(self, seating: Seating, in_flight: StepsInFlight, drafts: DraftPlaces) -> None:
        self._seating, self._rows, self._in_flight, self._drafts = seating, seating.rows, in_flight, drafts
        self._pending: PendingOutcome | None = None
        """For the oldest step in flight."""
        self._last: PendingOutcome | None = None
        """For the step confirmed last; None if a row was released since."""
        self._deferred: _DeferredWork | None = None

    def forget(self) -> None:
        """Rows have changed: outcomes that were derived from them are void."""
        self._pending = self._last = None

    def prepare(self) -> None:
        """Compute the pending outcome of the oldest step in flight."""
        oldest = self._in_flight.oldest
        if self._pending is None and oldest is not None and oldest.draft_places is None:
            self._pending = self._make_pending(oldest)

    def _make_pending(self, plan: StepPlan) -> PendingOutcome:
        before = self._last
        if before is not None and before.can_repeat and plan.repeats(before.epoch):
            return before.next()
        return make_pending_outcome(plan, self._rows)

    def repeats_left(self, epoch: int) -> int:
        """How many outcomes after the last one are that one with positions advanced, if steps of this epoch follow."""
        last = self._last
        if last is None or self._pending is not None or self._deferred is not None or last.epoch != epoch:
            return 0
        return last.steps_left - 1 if last.can_repeat else 0

    def repeat_many(self, tokens: Int32s) -> Int64s:
        """Confirm repeated decode steps, which drew these tokens [steps, rows]. Returns the requests of the rows."""
        assert self._last is not None
        first = self._last.next()
        self._last = last = self._last.next(len(tokens))
        self._rows.append_many(last.table_rows, first.positions, tokens)
        self._rows.confirmed[last.computed_rows] = last.computed
        return last.request_ids

    def confirm(
        self,
        step_no: int,
        tokens: Int32s,
        counts: Int32s | None,
        num_drafts: Int32s | None,
        trained: TrainedDrafts | None = None,
    ) -> tuple[Delivered, int]:
        """What the oldest step in flight delivers, and how many of the tokens were appended without a draw. The
        arguments are those of `Scheduler.confirm`."""
        plan, rows = self._in_flight.complete(step_no), self._rows
        outcome: PendingOutcome | DraftedOutcome
        if plan.draft_places is None:
            self._last = outcome = self._pending or self._make_pending(plan)
            self._pending = None
            tokens = outcome.active_tokens(tokens)
        else:
            if counts is None:
                raise AssertionError("a step with draft places needs the number of tokens per row")
            self.forget()
            self._drafts.observe(plan, counts, num_drafts, trained)
            outcome = DraftedOutcome(plan, rows, counts)
        delivered = outcome.deliver(rows, tokens)
        appended = delivered.insert_appended(rows) if rows.appended else []
        if rows.num_silent:
            delivered.end_silent(plan, rows)
        self._deferred = _DeferredWork(step_no, outcome, tokens, delivered.ended, appended)
        return delivered, sum(len(own) for _, own in appended) if appended else 0

    def run_deferred(self) -> list[tuple[int, Ended]]:
        """Do the bookkeeping of the step confirmed last. Returns the rows that ended, which must be released now."""
        done, self._deferred = self._deferred, None
        if done is None:
            return []
        outcome, seating, rows = done.outcome, self._seating, self._rows
        outcome.store(rows, done.drawn)
        for row, tokens in done.appended:
            rows.store(row, tokens)
        seating.pool.complete(done.step_no)
        rows.complete(done.step_no)
        if seating.checkpoints is not None:
            seating.checkpoints.complete(done.step_no)
        if not outcome.is_repeated:  # A repeated decode step only fills blocks of tokens drawn since admission.
            seating.register_admitted_blocks(outcome.computed_rows)
        seating.free_behind_windows(outcome.computed_rows)
        return done.ended
