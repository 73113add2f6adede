"""Chooses the rows of a step and how many tokens each computes, and takes the blocks that they need."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from millrace.plan.admitting import Admitting
from millrace.plan.budget import ChunkBudget, StepBudget
from millrace.plan.composing import Composer
from millrace.plan.drafts import DraftPlaces
from millrace.plan.in_flight import StepsInFlight
from millrace.plan.planner.protocol import ChosenRows
from millrace.plan.preempting import Preempting
from millrace.plan.queue.waiting import WaitingQueue
from millrace.plan.request import Request
from millrace.plan.row_choice import RowChoice
from millrace.plan.seating import Seating
from millrace.plan.step import Int64s


class Choosing:
    def __init__(
        self,
        seating: Seating,
        waiting: WaitingQueue,
        budget: StepBudget,
        in_flight: StepsInFlight,
        *,
        composer: Composer,
        drafts: DraftPlaces,
        admitting: Admitting,
        preempting: Preempting,
    ) -> None:
        self._seating, self._waiting, self._budget, self._in_flight = seating, waiting, budget, in_flight
        self._rows, self._pool = seating.rows, seating.pool
        self._composer, self._drafts = composer, drafts
        self._admitting, self._preempting = admitting, preempting
        self._choice = RowChoice(seating.rows, budget)

    def choose(self, now: float, only: Collection[int] | None) -> ChosenRows | None:
        """None if nothing can be computed before a step in flight completes. `only`: see `Scheduler.plan`."""
        if only is None:
            self._preempting.preempt_chosen(now)
        preempted_before = self._preempting.num_preemptions
        while True:
            singles, behind = self._take_singles(only)
            budget = self._budget.for_chunks(self._rows, singles, behind, self._waiting.num_by_class)
            limits = self._choice.chunk_limits(behind, budget, self._newcomer(now)) if len(behind) else []
            leaves_some = bool(limits) and sum(limits) < budget.left(int(self._rows.priority[behind].min()))
            chunks = self._take_chunks(behind, limits, budget) if limits else {}
            if len(singles) or chunks or len(self._in_flight) or only is not None or self._pool.num_soon:
                break
            if not self._preempting.preempt_one():
                break
        if only is None and len(self._waiting):
            if self._preempting.num_preemptions == preempted_before:
                self._admitting.admit(budget, chunks, now)
            else:
                self._admitting.delays.note("memory", now)
        if leaves_some:  # For another tenant, which may not have used it.
            self._extend_chunks(behind, chunks, budget)
        if len(singles) == 0 and not chunks:
            return None
        self._choice.count_skipped(singles)
        drafts = self._drafts.take(singles)
        rests = self._drafts.trained_rests
        if drafts is None:
            return ChosenRows(singles, chunks, None, 0.0, None, rests)
        return ChosenRows(singles, chunks, drafts, self._drafts.floor, self._drafts.trained, rests)

    def _take_singles(self, only: Collection[int] | None) -> tuple[Int64s, Int64s]:
        """Rows that get one token, with its block, and rows further behind."""
        seating = self._seating
        singles, behind = self._runnable(only)
        crossing = self._crossing(singles)
        if len(crossing) and len(crossing) > seating.num_available_columns:
            while self._lacks_blocks(len(crossing)) and self._preempting.preempt_one():
                singles, behind = self._runnable(only)
                crossing = self._crossing(singles)
            num_left = seating.num_available_columns
            stalled, crossing = crossing[num_left:], crossing[:num_left]
            singles = singles[~np.isin(singles, stalled)]
        if len(crossing):
            seating.grow_by_one(crossing)
        return singles, behind

    def _lacks_blocks(self, num_columns: int) -> bool:
        """True if the columns cannot be filled, not even when the steps and copies in flight have completed."""
        num_blocks = self._pool.num_available + self._pool.num_fenced + self._pool.num_soon
        return num_columns * self._seating.groups.num_groups > num_blocks

    def _newcomer(self, now: float) -> Request | None:
        """The first waiting request, if there is a row for it."""
        return next(self._waiting.in_order(now)) if len(self._waiting) and self._rows.num_free else None

    def _take_chunks(self, behind: Int64s, limits: list[int], budget: ChunkBudget) -> dict[int, int]:
        """Tokens by row for the rows that are more than one token behind. Takes the blocks."""
        chunks: dict[int, int] = {}
        for row, priority, limit in zip(behind.tolist(), self._rows.priority[behind].tolist(), limits, strict=True):
            count = self._budget.chunk(self._seating, row, min(limit, budget.left(priority)))
            if count:
                chunks[row] = count
                budget.take(priority, count)
        return chunks

    def _extend_chunks(self, behind: Int64s, chunks: dict[int, int], budget: ChunkBudget) -> None:
        for row, priority in zip(behind.tolist(), self._rows.priority[behind].tolist(), strict=True):
            count = self._budget.chunk(self._seating, row, budget.left(priority), taken=chunks.get(row, 0))
            if count:
                chunks[row] = chunks.get(row, 0) + count
                budget.take(priority, count)

    def _runnable(self, only: Collection[int] | None) -> tuple[Int64s, Int64s]:
        """Active rows that are one token behind, and those further behind, each by rank."""
        rows, order = self._rows, self._rows.order
        if len(order) == 0:
            return order, order
        if only is None and self._composer.repeats():
            return self._choice.choose(order), order[:0]
        if only is not None:
            order = order[np.isin(order, np.fromiter(only, np.int64, len(only)))]
        known = rows.known[order]
        behind = known - rows.computed[order]
        # A row at its limit has drawn its last token, which is not confirmed yet. Silent rows begin at their limit.
        may_run = known < rows.limit[order]
        if rows.num_silent:
            may_run |= rows.silent[order]
        singles = order[(behind == 1) & may_run]
        return singles if only is not None else self._choice.choose(singles), self._by_urgency(order[behind > 1])

    def _by_urgency(self, behind: Int64s) -> Int64s:
        """Rows that have drawn already go before prompts: somebody reads their tokens."""
        if len(behind) < 2:
            return behind
        has_drawn = self._rows.computed[behind] >= self._rows.num_prompt[behind]
        return np.concatenate([behind[has_drawn], behind[~has_drawn]]) if has_drawn.any() else behind

    def _crossing(self, singles: Int64s) -> Int64s:
        """The rows whose next token may need a new block."""
        if len(singles) == 0:
            return singles
        rows, repeated = self._rows, self._composer.repeated
        if repeated is not None and singles is repeated.order:
            crossing = repeated.crossing(rows)
            if crossing is not None:
                return crossing
        last = rows.computed[singles]
        if self._drafts.is_on:
            last += rows.slack[singles]
        return singles[last >= rows.num_blocks[singles] * self._rows.block_size]
