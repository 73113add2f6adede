"""What steps did, summed: composition of batches, gaps between tokens, drafts, bytes and FLOPs. A few array operations
per step, after its tokens were sent."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from millrace.observe.histograms import NUM_CLASSES, Histograms
from millrace.plan.rows import Rows
from millrace.plan.step import NO_EPOCH, Int32s, StepOutcome, StepPlan


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step must read and compute at least. All 0 if unknown."""

    weights_bytes: float = 0.0
    token_flops: float = 0.0
    """Per token: two for each active parameter."""
    context_bytes: float = 0.0
    """KV cache per token of context."""
    pair_flops: float = 0.0
    """Attention, per pair of a query and a token of its context."""


class StepFigures:
    def __init__(self, rows: Rows, histograms: Histograms, work: StepWork) -> None:
        self._rows, self._histograms, self._work = rows, histograms, work
        self._last_token = np.full(rows.capacity, math.nan)
        """By row: when its request got its last token; NaN if it has none."""
        self._common_rows: Int32s | None = None
        """Rows that all got their last token at `_common_at`; not yet in `_last_token`. None: there are none."""
        self._common_at = 0.0
        self._num_by_class: list[int] = []
        """Of those rows."""
        self._context = 0
        """Sum of the rows' contexts in the last step."""
        self._epoch = NO_EPOCH
        """Of the last step's plan."""
        self.output_tokens = 0
        self.step_rows = 0
        self.prefill_tokens = self.decode_tokens = self.padded_tokens = 0
        self.drafted_tokens = self.accepted_tokens = 0
        self.bytes_read = self.flops = 0.0

    def last_token_at(self, row: int) -> float:
        self._store_common()
        return float(self._last_token[row])

    def on_admitted(self, row: int, last_token: float) -> None:
        self._store_common()
        self._last_token[row] = last_token

    def on_step(self, plan: StepPlan, outcome: StepOutcome, now: float, num_drafts: Int32s | None = None) -> None:
        """`num_drafts`: drafts of each drawing row; None if only the places are known."""
        num_rows = len(plan.rows)
        self.step_rows += num_rows
        self.output_tokens += len(outcome.tokens)
        repeats, self._epoch = plan.repeats(self._epoch), plan.epoch
        if repeats:
            self._count_work(num_rows, self._context + num_rows, self._context + num_rows)
            self.decode_tokens += num_rows
            self.padded_tokens += plan.shape.tokens - num_rows
        elif num_rows:
            self._count_composition(plan)
        if plan.draft_places is not None:
            self._count_drafts(plan.draft_places if num_drafts is None else num_drafts, outcome)
        if len(outcome.tokens):
            self._note_gaps(plan, outcome, now, repeats=repeats)

    def running_by_class(self) -> tuple[int, ...]:
        rows = self._rows
        return tuple(np.bincount(rows.priority[rows.active], minlength=NUM_CLASSES)[:NUM_CLASSES].tolist())

    def _count_composition(self, plan: StepPlan) -> None:
        counts = plan.counts.astype(np.int64)
        num_single = int((counts == 1).sum())
        num_tokens = int(counts.sum())
        self.decode_tokens += num_single
        self.prefill_tokens += num_tokens - num_single
        num_places = 0 if plan.draft_places is None else int(plan.draft_places.sum())
        self.padded_tokens += max(0, plan.shape.tokens - num_tokens - num_places)
        ends = plan.starts + counts
        # A chunk from s to e attends to (s + 1) + … + e tokens.
        pairs = int((counts * (plan.starts + ends + 1)).sum()) // 2
        self._count_work(num_tokens, int(ends.sum()), pairs)

    def _count_work(self, num_tokens: int, context: int, pairs: int) -> None:
        work = self._work
        self._context = context
        self.bytes_read += work.weights_bytes + work.context_bytes * context
        self.flops += work.token_flops * num_tokens + work.pair_flops * pairs

    def _count_drafts(self, num_drafts: Int32s, outcome: StepOutcome) -> None:
        self.drafted_tokens += int(num_drafts.sum())
        index = outcome.sample_index
        self.accepted_tokens += int((index[1:] == index[:-1]).sum()) - outcome.num_appended

    def _note_gaps(self, plan: StepPlan, outcome: StepOutcome, now: float, *, repeats: bool) -> None:
        has_several = plan.draft_places is not None or bool(outcome.num_appended)
        is_whole = len(outcome.tokens) == len(plan.rows) and not has_several
        if repeats and is_whole and self._common_rows is not None:
            self._histograms.observe_same_gap(now - self._common_at, self._num_by_class)
            self._common_at = now
            return
        self._store_common()
        rows = plan.rows[plan.samples][outcome.sample_index]
        priorities = self._rows.priority[rows]
        if is_whole:
            self._common_rows, self._num_by_class = rows, np.bincount(priorities, minlength=NUM_CLASSES).tolist()
            self._common_at = now
        self._observe_gaps(rows, priorities, now, has_several=has_several)

    def _observe_gaps(self, rows: Int32s, priorities: Int32s, now: float, *, has_several: bool) -> None:
        """Tokens of one row in one step arrive together: all but the first have a gap of 0."""
        gaps = now - self._last_token[rows]
        if has_several:
            gaps[1:][rows[1:] == rows[:-1]] = 0.0
        self._last_token[rows] = now
        is_gap = gaps == gaps  # Not NaN: it is not the first token.
        if not is_gap.all():
            gaps, priorities = gaps[is_gap], priorities[is_gap]
        if len(gaps):
            self._histograms.observe_gaps(gaps, priorities)

    def _store_common(self) -> None:
        if self._common_rows is not None:
            self._last_token[self._common_rows] = self._common_at
            self._common_rows = None
