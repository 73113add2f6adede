"""Places for drafts: how many tokens beyond its own each decoding row may verify in a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from millrace.plan.drafting.control import DraftControl
from millrace.plan.seating import Seating
from millrace.plan.step import Int32s, Int64s, StepPlan


@dataclass(frozen=True, slots=True)
class DraftSettings:
    max_drafts: int = 0
    """Drafts of one row in one step; 0 turns drafting off."""
    max_places: int = 1 << 30
    """Tokens that a step may verify in all, each row's own included."""
    is_fixed: bool = True
    """Always `max_drafts`; else as many as pay."""
    is_padded: bool = False
    """Every row of a step is computed with all its places, used or not."""


class DraftPlaces:
    def __init__(self, settings: DraftSettings, seating: Seating) -> None:
        self._settings, self._seating, self._rows = settings, seating, seating.rows
        self.control = DraftControl(
            seating.rows.capacity, settings.max_drafts, is_padded=settings.is_padded, fixed=settings.is_fixed
        )
        self.floor = 0.0
        """`StepPlan.draft_floor` of the places taken last."""
        self._num_drafts: dict[int, int] = {}
        """By step to be measured: drafts that it verified."""

    def take(self, singles: Int64s) -> Int32s | None:
        """Places for the drafts of each row, with the blocks for them; None if no row gets any.

        Drafts are optional: rows go without when blocks are short or when the step would verify too many tokens.
        """
        places = self._wanted(singles)
        if places is not None and not self._take_blocks(singles, places):
            places = None
        if places is None and self._rows.slack[singles].any():
            # Steps in flight verify drafts of these rows: only the device knows where this step begins.
            return np.zeros(len(singles), np.int32)
        return places

    def _wanted(self, singles: Int64s) -> Int32s | None:
        settings, rows = self._settings, self._rows
        per_row = min(settings.max_drafts, settings.max_places // max(1, len(singles)) - 1)
        if per_row <= 0 or len(singles) == 0 or not rows.can_draft[singles].any():
            return None
        decision = self.control.decide(singles, rows.request_ids[singles])
        per_row, self.floor = min(per_row, decision.max_drafts), decision.min_probability
        if per_row <= 0:
            return None
        # The last token that the limit allows needs no draft before it.
        left = rows.limit[singles] - rows.known[singles] - 1
        places: Int32s = np.where(rows.can_draft[singles], np.clip(left, 0, per_row), 0).astype(np.int32)
        return places if places.any() else None

    def _take_blocks(self, singles: Int64s, places: Int32s) -> bool:
        """Take blocks for the most that the rows can reach. False, with nothing taken, if there are not enough."""
        rows, size = self._rows, self._rows.block_size
        most = rows.computed[singles] + rows.slack[singles] + 1 + places
        columns = -(-np.minimum(most, rows.limit[singles]) // size) - rows.num_blocks[singles]
        if int(np.maximum(columns, 0).sum()) > self._seating.num_available_columns:
            return False
        for at in np.flatnonzero(columns > 0).tolist():
            self._seating.grow(int(singles[at]), int(columns[at]))
        return True

    def observe(self, plan: StepPlan, counts: Int32s, num_drafts: Int32s | None) -> None:
        """A step with places was confirmed. `counts`: tokens of each sampling row. `num_drafts`: drafts that each had;
        None if only the places are known."""
        if plan.draft_places is None or self._settings.is_fixed or not plan.draft_places.any():
            return
        if not _only_decodes(plan):
            return
        drafts = plan.draft_places if num_drafts is None else num_drafts
        drawn = counts > 0  # The others are past their limit.
        rows = plan.rows[drawn].astype(np.int64)
        self.control.observe_drafts(rows, self._rows.request_ids[rows], drafts[drawn], counts[drawn] - 1)
        self._num_drafts[plan.step_no] = int(drafts.sum())

    def observe_time(self, plan: StepPlan, seconds: float) -> None:
        """A completed step occupied the device for this long."""
        num_drafts = self._num_drafts.pop(plan.step_no, 0)
        if not self._settings.max_drafts or self._settings.is_fixed or seconds <= 0 or not _only_decodes(plan):
            return
        num_rows, has_places = len(plan.rows), plan.draft_places is not None
        if plan.draft_places is not None and self._settings.is_padded:
            num_drafts = num_rows * int(plan.draft_places.max())
        self.control.observe_time(num_rows, num_rows + num_drafts, seconds, has_places=has_places)


def _only_decodes(plan: StepPlan) -> bool:
    return bool(len(plan.rows)) and bool((plan.counts == 1).all()) and bool(plan.samples.all())
