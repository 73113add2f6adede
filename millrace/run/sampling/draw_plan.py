"""Which rows of a step draw, and in which head group.

Rows that need logits (temperature, bias, penalties, log-probabilities, a mask, a minimum length not yet reached) and
rows that a greedy head can draw may be two groups of one step, each with a head of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from millrace.plan.step import Int32s, Int64s, Masks, StepPlan, Variant
from millrace.run.sampling.row_params import RowParamTable

NO_MASK = -1

_NONE = np.zeros(0, np.int64)
_NO_COUNTS = np.zeros(0, np.int32)


@dataclass(slots=True)  # Never modified, but a frozen dataclass takes several times as long to create.
class DrawPlan:
    """`due` numbers the rows of the plan; the other indices number the tokens drawn, which are in plan order."""

    due: Int64s
    """The rows that draw."""
    full: Int64s
    """Tokens drawn from logits."""
    greedy: Int64s
    """Tokens drawn by the greedy head."""
    masked: Int64s
    """Tokens that a grammar restricts; all of them are in `full`."""
    scored: Int64s
    """Tokens with log-probabilities; all of them are in `full`."""
    num_logprobs: Int32s
    """Number of top tokens of each scored token."""
    shaped: Int64s
    """Tokens that `shaped_rows.py` draws; all of them are in `full`, whose own draw is replaced."""
    is_reusable: bool
    """True if a step that repeats this one can draw by the same plan."""

    @property
    def groups(self) -> tuple[tuple[Variant, int], ...]:
        """(variant, number of states) of each head group, in the order in which they draw."""
        counts: tuple[tuple[Variant, int], ...] = (("greedy", len(self.greedy)), ("full", len(self.full)))
        return tuple(group for group in counts if group[1])

    @property
    def order(self) -> Int64s | None:
        """Tokens by group, `full` first; None if there is one group."""
        return np.concatenate([self.full, self.greedy]) if len(self.full) and len(self.greedy) else None

    def mask_lines(self, num_places: int = 1, masks: Masks | None = None) -> Int32s:
        """Line of the mask of each full token, `num_places` of each row, NO_MASK for none. Without `masks`, which may
        be known later, each masked row has one mask, for its first place."""
        index, places = (self.masked, None) if masks is None else (masks.index, masks.places)
        lines = np.full((len(self.due), num_places), NO_MASK, np.int32)
        lines[index, 0 if places is None else places] = np.arange(len(index))
        return lines[self.full].ravel()


def plan_draws(plan: StepPlan, row_params: RowParamTable, *, is_split: bool) -> DrawPlan:
    """`is_split`: greedy rows have a head of their own beside one for logits, as the plan says."""
    due = plan.samples.nonzero()[0]
    if not row_params.num_needing and not row_params.num_adjusted and plan.masked is None:
        return DrawPlan(due, _NONE, np.arange(len(due)), _NONE, _NONE, _NO_COUNTS, _NONE, is_reusable=True)
    rows = plan.rows[due]
    needs, masked = row_params.needs_logits[rows], _NONE
    if plan.masked is not None:
        is_masked = plan.masked[due]
        needs, masked = needs | is_masked, is_masked.nonzero()[0]
    if not row_params.is_adjusted[rows].any():
        return DrawPlan(due, *_groups(needs, is_split), masked, _NONE, _NO_COUNTS, _NONE, is_reusable=True)
    early = (plan.starts + plan.counts)[due] < row_params.ends_from[rows]
    num_logprobs = row_params.num_logprobs[rows]
    scored = (num_logprobs >= 0).nonzero()[0]
    full, greedy = _groups(needs | early, is_split)
    # Once a row is past its minimum length, it may be drawn greedily.
    is_reusable = not bool(early.any())
    shaped = row_params.is_shaped[rows].nonzero()[0]
    return DrawPlan(due, full, greedy, masked, scored, num_logprobs[scored], shaped, is_reusable)


def _groups(needs_logits: np.ndarray[tuple[int], np.dtype[np.bool_]], is_split: bool) -> tuple[Int64s, Int64s]:
    """(full, greedy)"""
    everything, num_full = np.arange(len(needs_logits)), int(np.count_nonzero(needs_logits))
    if num_full == 0:
        return _NONE, everything
    if num_full == len(everything) or not is_split:
        return everything, _NONE
    return needs_logits.nonzero()[0], (~needs_logits).nonzero()[0]
