"""What steps did, summed: composition of batches, gaps between tokens, drafts, bytes and FLOPs.

A step is only noted, after its tokens were sent. Many steps are counted at once, when their figures are read: a few
array operations then take the place of a few in every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from millrace.engine.cycle import Confirmed
from millrace.engine.figures.step_log import StepHistory
from millrace.engine.figures.token_gaps import MAX_STEPS, TokenGaps
from millrace.observe.histograms import NUM_CLASSES, Floats, Histograms
from millrace.plan.planner.protocol import RunningRows
from millrace.plan.step import Int32s, Int64s, StepOutcome, StepPlan

NONE: Mapping[str, Histograms] = {}


@dataclass(frozen=True, slots=True)
class ModelWork:
    """What a step must read and compute at least. All 0 if unknown."""

    weights_bytes: float = 0.0
    token_flops: float = 0.0
    """Per token: two for each active parameter."""
    context_bytes: float = 0.0
    """KV cache per token of context."""
    pair_flops: float = 0.0
    """Attention, per pair of a query and a token of its context."""


class StepFigures:
    """Totals of all steps up to the last `count`, except `output_tokens` and those of drafts, which are up to date."""

    def __init__(
        self, rows: RunningRows, histograms: Histograms, work: ModelWork, of_adapters: Mapping[str, Histograms] = NONE
    ) -> None:
        """`of_adapters`: histograms of their own, by name of the adapter."""
        self._rows = rows
        self._work = work
        self._gaps = TokenGaps(rows, histograms)
        self._of_adapters = {
            name: (TokenGaps(rows, own, of_some=True), np.zeros(rows.capacity, np.bool_))
            for name, own in of_adapters.items()
        }
        """Gaps, and the rows whose requests have the adapter."""
        self._log = StepHistory()
        self._noted: list[tuple[float, ...]] = []
        """Steps since the last count: number, launch, end, time on the device, rows, tokens with padding and places for
        drafts."""
        self._starts: list[Int32s] = []
        self._counts: list[Int32s] = []
        """Columns of their plans."""
        self.output_tokens = 0
        self.step_rows = 0
        self.prefill_tokens = self.decode_tokens = self.padded_tokens = 0
        self.drafted_tokens = self.accepted_tokens = 0
        self.bytes_read = self.flops = 0.0

    def last_token_at(self, row: int) -> float:
        return self._gaps.last_token_at(row)

    def on_admitted(self, row: int, last_token: float, adapter: str = "") -> None:
        self._gaps.on_admitted(row, last_token)
        for name, (gaps, is_own) in self._of_adapters.items():
            is_own[row] = name == adapter
            if name == adapter:
                gaps.on_admitted(row, last_token)

    def on_step(self, done: Confirmed) -> None:
        plan, outcome = done.plan, done.outcome
        num_rows, num_tokens, num_places = len(plan.rows), len(outcome.tokens), 0
        if not num_rows:
            return
        if plan.draft_places is not None:
            num_places = int(plan.draft_places.sum())
            num_drafts = done.result.num_drafts
            self._count_drafts(num_places if num_drafts is None else int(num_drafts.sum()), outcome)
        self.output_tokens += num_tokens
        self._noted.append(
            (plan.step_no, done.launched_at, done.at, done.device_s, num_rows, plan.shape.tokens, num_places)
        )
        self._starts.append(plan.starts)
        self._counts.append(plan.counts)
        if num_tokens:
            self._note_tokens(plan, outcome, done.at)
        if len(self._noted) >= MAX_STEPS:
            self.count()

    def _note_tokens(self, plan: StepPlan, outcome: StepOutcome, now: float) -> None:
        rows, is_distinct = plan.rows, plan.draft_places is None and not outcome.num_appended
        if not is_distinct or len(outcome.tokens) != len(rows):
            rows = rows[plan.samples][outcome.sample_index]
        num_first, num_last = len(outcome.first_ids), 0
        for ended in outcome.ended:
            if ended.stop_token_id >= 0:  # An end token is not delivered.
                num_first -= ended.num_output == 1
            elif ended.reason == "length":  # Pooled requests have no tokens.
                num_last += ended.num_output > 0
                num_first -= ended.num_output == 0
        self._gaps.note(rows, now, num_first=num_first, num_last=num_last, is_distinct=is_distinct)
        for gaps, is_own in self._of_adapters.values():
            if len(own := rows[is_own[rows]]):
                gaps.note(own, now, num_first=0, num_last=0, is_distinct=is_distinct)

    def _count_drafts(self, num_drafts: int, outcome: StepOutcome) -> None:
        self.drafted_tokens += num_drafts
        index = outcome.sample_index
        self.accepted_tokens += int((index[1:] == index[:-1]).sum()) - outcome.num_appended

    def count(self) -> None:
        """Count the steps noted since the last time."""
        self._gaps.count()
        for gaps, _ in self._of_adapters.values():
            gaps.count()
        if not self._noted:
            return
        noted, starts, counts = np.array(self._noted), np.concatenate(self._starts), np.concatenate(self._counts)
        self._noted, self._starts, self._counts = [], [], []
        num_rows, num_computed, num_places = noted[:, 4:].T.astype(np.int64)
        decoded, prefilled, context, pairs = _composition(num_rows, starts, counts)
        num_tokens, work = decoded + prefilled, self._work
        bytes_read = work.weights_bytes + work.context_bytes * context
        flops = work.token_flops * num_tokens + work.pair_flops * pairs
        self.step_rows += int(num_rows.sum())
        self.decode_tokens += int(decoded.sum())
        self.prefill_tokens += int(prefilled.sum())
        self.padded_tokens += int(np.maximum(0, num_computed - num_tokens - num_places).sum())
        self.bytes_read += float(bytes_read.sum())
        self.flops += float(flops.sum())
        self._log.add(np.column_stack([noted[:, :5], prefilled, decoded, bytes_read, flops]))

    def last_steps(self, count: int) -> dict[str, Any]:
        self.count()
        return self._log.last(count)

    def running_by_class(self) -> tuple[int, ...]:
        rows = self._rows
        return tuple(np.bincount(rows.priority[rows.active], minlength=NUM_CLASSES)[:NUM_CLASSES].tolist())


def _composition(num_rows: Int64s, starts: Int32s, counts: Int32s) -> tuple[Int64s, Int64s, Int64s, Int64s]:
    """Per step: decode tokens, prefill tokens, sum of the rows' contexts, and pairs of a query and a token it attends
    to. `starts` and `counts` are those of all steps, one after the other."""
    ends, num_steps = num_rows.cumsum(), len(num_rows)
    chunks = (counts != 1).nonzero()[0]
    step_of = ends.searchsorted(chunks, side="right")

    def by_step(values: Floats | Int64s | None) -> Int64s:
        return np.bincount(step_of, values, num_steps).astype(np.int64)

    count, start = counts[chunks].astype(np.int64), starts[chunks]
    decoded, prefilled = num_rows - by_step(None), by_step(count)
    context = np.add.reduceat(starts, ends - num_rows, dtype=np.int64) + decoded + prefilled
    # A chunk of c tokens after s attends to (s + 1) + … + (s + c) tokens; the context counts its s + c.
    return decoded, prefilled, context, context + by_step((count - 1) * (2 * start + count) // 2)
