"""Many steps at once: as long as nothing happens but that the same rows decode, for simulations."""

from __future__ import annotations

from millrace.plan.budget import StepBudget
from millrace.plan.composing import Composer
from millrace.plan.confirming import Confirming
from millrace.plan.drafts import DraftPlaces
from millrace.plan.in_flight import StepsInFlight
from millrace.plan.planner.protocol import RepeatedOutcome
from millrace.plan.rows.repeated_decode import crossings
from millrace.plan.seating import Seating
from millrace.plan.step import Int32s, StepPlan


class Repeating:
    def __init__(
        self,
        seating: Seating,
        budget: StepBudget,
        in_flight: StepsInFlight,
        composer: Composer,
        drafts: DraftPlaces,
        confirming: Confirming,
    ) -> None:
        self._seating, self._budget, self._in_flight = seating, budget, in_flight
        self._composer, self._drafts, self._confirming = composer, drafts, confirming
        self._rows, self._pool = seating.rows, seating.pool

    def ahead(self) -> tuple[StepPlan, int] | None:
        """See `Scheduler.repeats_ahead`, while no request waits and no copy is in flight."""
        repeated = self._composer.repeated
        if repeated is None or not self._is_plain:
            return None
        oldest = self._in_flight.oldest
        if len(self._in_flight) > 1 or (oldest is not None and oldest is not repeated.plan):
            return None
        count = min(repeated.plans_left, self._confirming.repeats_left(repeated.plan.epoch))
        rows, order = self._rows, repeated.order
        while count > 1:
            computed, num_blocks = rows.computed[order], rows.num_blocks[order]
            if crossings(computed, num_blocks, rows.block_size, count)[1] <= self._seating.num_available_columns:
                return repeated.plan, count
            count //= 2
        return None

    @property
    def _is_plain(self) -> bool:
        """True if no running row and no block can change what the next steps are."""
        rows, pool, groups = self._rows, self._pool, self._seating.groups
        is_shared = rows.flows.num_open > 1 and self._budget.times is not None
        is_moving = pool.num_soon or pool.num_fenced or rows.num_fenced or rows.appended
        is_special = rows.num_timed or rows.num_constrained or rows.num_silent or rows.num_pooled or rows.num_scored
        has_groups = groups.num_groups > 1 or groups.windowed
        return not (is_shared or is_moving or is_special or has_groups or self._drafts.is_on)

    def repeat(self, tokens: Int32s) -> RepeatedOutcome:
        """See `Scheduler.repeat`."""
        repeated = self._composer.repeated
        assert repeated is not None
        rows, order, count = self._rows, repeated.order, len(tokens)
        at, _ = crossings(rows.computed[order], rows.num_blocks[order], rows.block_size, count)
        self._seating.grow_ahead(order[at])
        return RepeatedOutcome(self._composer.repeat_many(repeated, count), self._confirming.repeat_many(tokens))
