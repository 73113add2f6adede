"""Repeated decode steps: as long as the same rows decode, a plan differs from the previous one only in positions."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from millrace.plan.rows.rows import Rows
from millrace.plan.shapes.heads import DueRows
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
    due: DueRows | None = None
    """The rows that draw, if they are the same in every further plan."""
    room: Int32s | None = None
    """Tokens that still fit in the blocks of each row, when `crossing` was called first; empty if some row has blocks
    that it does not need yet."""
    crossings: dict[int, Int64s] = field(default_factory=dict)
    """By room: the rows that had it."""
    num_since: int = 0
    """Plans since then."""
    asked_at: int = -1
    """`num_since` at the last call of `crossing`."""

    def can_repeat(self, rows: Rows) -> bool:
        """True if the next plan may have the same rows. Each is one token behind: the token it just drew."""
        return rows.epoch == self.rows_epoch and self.plans_left > 0

    def advance(self, plan: StepPlan, count: int = 1) -> None:
        self.plan = plan
        self.plans_left -= count
        self.num_since += count

    def crossing(self, rows: Rows) -> Int64s | None:
        """The rows that need a new block for the next plan, which comes round for each row after a block of tokens.
        None if that must be computed. The caller gives the rows their blocks, or makes a plan that repeats nothing."""
        if self.room is None:
            self.room, self.num_since = self._rooms(rows), 0
        if self.asked_at == self.num_since or not len(self.room):
            return None  # Asked before: some rows may have their blocks already.
        self.asked_at = self.num_since
        room = self.num_since % rows.block_size
        if room not in self.crossings:
            self.crossings[room] = self.order[self.room == room]
        return self.crossings[room]

    def _rooms(self, rows: Rows) -> Int32s:
        order = self.order
        rooms: Int32s = rows.num_blocks[order] * rows.block_size - rows.computed[order]
        has_more = bool((rooms >= rows.block_size).any()) or bool(rows.slack[order].any())
        return rooms[:0] if has_more else rooms


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
