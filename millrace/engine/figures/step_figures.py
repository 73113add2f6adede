"""What steps did, summed: composition of batches, gaps between tokens, drafts, bytes and FLOPs. A few array operations
per step, after its tokens were sent."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from millrace.observe.histograms import NUM_CLASSES, Histograms
from millrace.plan.rows import Rows
from millrace.plan.step import NO_EPOCH, Bools, Int32s, StepOutcome, StepPlan


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
        self._last_at = math.nan
        """When the last step delivered tokens."""
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
        return float(self._last_token[row])

    def on_admitted(self, row: int, last_token: float) -> None:
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
            self._note_gaps(plan, outcome, now)

    def running_by_class(self) -> tuple[int, ...]:
        rows = self._rows
        return tuple(np.bincount(rows.priority[rows.active], minlength=NUM_CLASSES)[:NUM_CLASSES].tolist())

    def _count_composition(self, plan: StepPlan) -> None:
        chunks = (plan.counts != 1).nonzero()[0]
        counts, starts = plan.counts[chunks].tolist(), plan.starts[chunks].tolist()
        num_single, num_chunked = len(plan.rows) - len(counts), sum(counts)
        num_tokens = num_single + num_chunked
        self.decode_tokens += num_single
        self.prefill_tokens += num_chunked
        num_places = 0 if plan.draft_places is None else int(plan.draft_places.sum())
        self.padded_tokens += max(0, plan.shape.tokens - num_tokens - num_places)
        context = int(plan.starts.sum()) + num_tokens
        # A chunk of c tokens after s attends to (s + 1) + … + (s + c) tokens; the context counts its s + c.
        pairs = context + sum((c - 1) * (2 * s + c) // 2 for s, c in zip(starts, counts, strict=True))
        self._count_work(num_tokens, context, pairs)

    def _count_work(self, num_tokens: int, context: int, pairs: int) -> None:
        work = self._work
        self._context = context
        self.bytes_read += work.weights_bytes + work.context_bytes * context
        self.flops += work.token_flops * num_tokens + work.pair_flops * pairs

    def _count_drafts(self, num_drafts: Int32s, outcome: StepOutcome) -> None:
        self.drafted_tokens += int(num_drafts.sum())
        index = outcome.sample_index
        self.accepted_tokens += int((index[1:] == index[:-1]).sum()) - outcome.num_appended

    def _note_gaps(self, plan: StepPlan, outcome: StepOutcome, now: float) -> None:
        """Most rows got their last token in the step before: they have the same gap and are only counted."""
        rows = plan.rows
        if len(outcome.tokens) != len(rows) or plan.draft_places is not None or outcome.num_appended:
            rows = rows[plan.samples][outcome.sample_index]
        last, (last_at, self._last_at) = self._last_token[rows], (self._last_at, now)
        self._last_token[rows] = now
        if plan.draft_places is not None or outcome.num_appended:
            # Tokens of one row in one step arrive together: all but the first have a gap of 0.
            last[1:][rows[1:] == rows[:-1]] = now
        is_common = last == last_at
        num_common = int(np.count_nonzero(is_common))
        if num_common < len(rows):
            others = (~is_common & (last == last)).nonzero()[0]  # Not NaN: it is not the first token.
            if len(others):
                self._histograms.observe_gaps(now - last[others], self._rows.priority[rows[others]])
        if num_common:
            self._histograms.observe_same_gap(now - last_at, self._num_by_class(rows, is_common, num_common))

    def _num_by_class(self, rows: Int32s, chosen: Bools, num_chosen: int) -> list[int]:
        classes = self._rows.classes
        if len(classes) == 1:
            return [num_chosen if one in classes else 0 for one in range(NUM_CLASSES)]
        counts: list[int] = np.bincount(self._rows.priority[rows[chosen]], minlength=NUM_CLASSES).tolist()
        return counts
