"""Repeated decode steps: as long as the same rows decode, a plan differs from the previous one only in positions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from millrace.plan.rows import Rows
from millrace.plan.step import Int32s, Int64s, StepPlan


@dataclass(slots=True)
class RepeatedDecode:
    """The last plan decoded every active row without drafts, so the next one can repeat it, one position later."""

    rows_epoch: int
    """`Rows.epoch` at that time. Every admission and release increases it, so an equal epoch means the same rows."""
    order: Int64s
    plan: StepPlan
    """The last plan."""
    plans_left: int
    """Plans until the first row reaches its limit."""

    def can_repeat(self, rows: Rows) -> bool:
        """True if the next plan may have the same rows. Each is one token behind: the token it just drew."""
        return rows.epoch == self.rows_epoch and self.plans_left > 0

    def advance(self, plan: StepPlan, count: int = 1) -> None:
        self.plan = plan
        self.plans_left -= count


def crossings(computed: Int32s, num_blocks: Int32s, block_size: int, count: int) -> tuple[Int64s, int]:
    """For `count` further decode steps: the row of each block that is needed, in the order in which steps one after
    the other would take them, and their number. `computed`, `num_blocks`: of each row."""
    needed = np.maximum((computed + count - 1) // block_size + 1 - num_blocks, 0)
    total = int(needed.sum())
    at = np.repeat(np.arange(len(computed)), needed)
    places = np.arange(total) - np.repeat(np.cumsum(needed) - needed, needed)
    steps = (num_blocks[at] + places) * block_size - computed[at]
    return at[np.lexsort((at, steps))], total


def repeated_decode_from(plan: StepPlan, num_singles: int, rows: Rows) -> RepeatedDecode | None:
    """What the next plan can repeat of this one, or None. `num_singles`: the plan's rows with a single token."""
    order = rows.order
    if plan.draft_places is not None or not num_singles == len(order) == len(plan.rows):
        return None
    return RepeatedDecode(rows.epoch, order, plan, int((rows.limit[order] - rows.known[order]).min()))
