"""Repeated decode steps: as long as the same rows decode, a plan differs from the previous one only in positions."""

from __future__ import annotations

from dataclasses import dataclass

from millrace.plan.rows import Rows
from millrace.plan.step import Int64s, StepPlan


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

    def advance(self, plan: StepPlan) -> None:
        self.plan = plan
        self.plans_left -= 1


def repeated_decode_from(plan: StepPlan, num_singles: int, rows: Rows) -> RepeatedDecode | None:
    """What the next plan can repeat of this one, or None. `num_singles`: the plan's rows with a single token."""
    order = rows.order
    if plan.draft_places is not None or not num_singles == len(order) == len(plan.rows):
        return None
    return RepeatedDecode(rows.epoch, order, plan, int((rows.limit[order] - rows.known[order]).min()))
