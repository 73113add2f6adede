"""Plan after plan of the same rows, each with one token more: most of such a plan is that of the one before."""

from __future__ import annotations

from dataclasses import dataclass

from millrace.plan.rows import Rows
from millrace.plan.step import Int64s, StepPlan


@dataclass(slots=True)
class RepeatedDecode:
    """Every active row decodes, and nothing but their positions has changed since the last plan."""

    order: Int64s
    """The active rows then. Whenever a row comes or goes, `Rows.order` is another array."""
    plan: StepPlan
    """The last one."""
    plans_left: int
    """Plans until one of the rows has come to its limit."""

    def goes_on(self, rows: Rows) -> bool:
        """Whether the next plan may have the same rows again. Each is one token behind: the one that it drew."""
        return rows.order is self.order and self.plans_left > 0

    def advance(self, plan: StepPlan) -> None:
        self.plan = plan
        self.plans_left -= 1


def repeated_decode_from(plan: StepPlan, singles: Int64s, rows: Rows) -> RepeatedDecode | None:
    """With a plan of which `singles` are those rows that get one token, planned already."""
    order = rows.order
    if not len(singles) == len(order) == len(plan.rows):
        return None
    return RepeatedDecode(order, plan, int((rows.limit[order] - rows.known[order]).min()))
