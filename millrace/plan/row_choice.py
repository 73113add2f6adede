"""Divides a step between tenants: which rows decode where all of them together would take too long, and whose prompts
are computed.

The requests of one tenant and class form a flow. If all rows run in every step, a tenant with a single row gets its
tokens at the pace of the slowest step, however many rows others have. So when a step would take longer than its target,
flows share it by their weights: one that asks for less than its share runs all its rows in every step, and the rows of
the others take turns. Without several flows nothing changes: leaving rows out would only make every answer later.
"""

from __future__ import annotations

import math

import numpy as np

from millrace.plan.budget import ChunkBudget, StepBudget
from millrace.plan.pacing.step_time import Floats
from millrace.plan.request import BATCH, Request
from millrace.plan.rows.rows import Rows
from millrace.plan.step import Int64s

KEPT_THROUGHPUT = 0.92
"""Rows are left out only as far as the predicted tokens per second stay above this share of those with all rows."""
MAX_TURNS = 8
"""Each row runs at least once in so many steps."""
_NO_ROWS = np.zeros(0, np.int64)


class RowChoice:
    def __init__(self, rows: Rows, budget: StepBudget) -> None:
        self._rows, self._budget = rows, budget
        self._left_out = _NO_ROWS
        self._has_skipped = False

    def choose(self, singles: Int64s) -> Int64s:
        """The rows that decode in this step, of those that could, in the same order."""
        self._left_out = _NO_ROWS
        times, rows = self._budget.times, self._rows
        if times is None or rows.flows.num_open < 2 or len(singles) < 2:
            return singles
        num_rows = len(singles)
        decode_s = times.decode_s(num_rows, int(rows.known[singles].sum()))
        if decode_s <= self._budget.step_s:
            return singles
        num_fitting = _num_fitting(num_rows, times.step_s, decode_s, self._budget.step_s)
        flows, flow_of = np.unique(rows.flow[singles], return_inverse=True)
        if num_fitting >= num_rows or len(flows) < 2:
            return singles
        wanted = np.bincount(flow_of)
        granted = _shares(wanted, np.array(rows.flows.weights(flows.tolist())), num_fitting)
        is_chosen = self._places_in_flow(singles, flow_of, wanted) < granted[flow_of]
        self._left_out = singles[~is_chosen]
        return singles[is_chosen]

    def chunk_limits(self, behind: Int64s, budget: ChunkBudget, newcomer: Request | None) -> list[int]:
        """Most tokens of each row in this step: flows share the budget, so that nobody waits for the end of another
        tenant's long prompt. `newcomer`: the first request without a row, for whose flow something is left over."""
        rows = self._rows
        has_newcomer = newcomer is not None and not rows.flows.has_any(newcomer, rows.flow[behind].tolist())
        if not has_newcomer and (rows.flows.num_open < 2 or len(behind) < 2):
            return [budget.left(priority) for priority in rows.priority[behind].tolist()]
        wanted = (rows.known[behind] - rows.computed[behind]).astype(np.int64)
        flows, first, flow_of = np.unique(rows.flow[behind], return_index=True, return_inverse=True)
        by_flow, weights = np.bincount(flow_of, wanted), np.array(rows.flows.weights(flows.tolist()))
        classes = rows.priority[behind[first]]
        if newcomer is not None and has_newcomer:
            by_flow, weights = np.append(by_flow, newcomer.num_prompt), np.append(weights, newcomer.weight)
            classes = np.append(classes, newcomer.priority)
        yields = classes > budget.urgent
        if yields.any():
            level = _level(by_flow[yields], weights[yields], budget.left(BATCH))
            by_flow[yields] = np.minimum(by_flow[yields], weights[yields] * level)
        granted = np.ceil(np.minimum(weights * _level(by_flow, weights, budget.tokens), by_flow))
        limits = []
        for at, tokens in zip(flow_of.tolist(), wanted.tolist(), strict=True):
            limits.append(int(min(tokens, granted[at])))
            granted[at] -= limits[-1]
        return limits

    def _places_in_flow(self, singles: Int64s, flow_of: Int64s, wanted: Int64s) -> Int64s:
        """Place of each row among those of its flow: the longer it was left out, the earlier."""
        order = np.lexsort((np.arange(len(singles)), -self._rows.skipped[singles], flow_of))
        places = np.empty(len(singles), np.int64)
        places[order] = np.arange(len(singles)) - (np.cumsum(wanted) - wanted)[flow_of[order]]
        return places

    def count_skipped(self, singles: Int64s) -> None:
        """The step is planned, with the rows chosen last."""
        if len(self._left_out) or self._has_skipped:
            self._rows.skipped[singles] = 0
            self._rows.skipped[self._left_out] += 1
            self._has_skipped = len(self._left_out) > 0


def _num_fitting(num_rows: int, fixed_s: float, decode_s: float, step_s: float) -> int:
    """Rows that a step of `step_s` computes, or more if that would cost too much throughput. All rows take `decode_s`,
    of which `fixed_s` does not depend on their number."""
    rows_s = decode_s - fixed_s
    if rows_s <= 0:
        return num_rows
    in_time = (step_s - fixed_s) / rows_s * num_rows
    # n rows give n / (fixed + n * row) tokens per second; solved for n at the least throughput that is kept.
    at_least = KEPT_THROUGHPUT * num_rows * fixed_s / (fixed_s + (1 - KEPT_THROUGHPUT) * rows_s)
    return max(1, int(in_time), math.ceil(at_least))


def _shares(wanted: Int64s, weights: Floats, num_fitting: int) -> Int64s:
    """Rows of each flow in the step: its share by weight, with what some do not need going to the others.

    The flow that wants least for its weight gets all it wants, even if not everything fits: if flows ask alike, none
    would gain from the others' waiting.
    """
    level = max(_level(wanted, weights, num_fitting), float((wanted / weights).min()))
    granted = np.ceil(weights * level - 1e-9).astype(np.int64)
    return np.clip(granted, -(-wanted // MAX_TURNS), wanted)


def _level(wanted: Int64s | Floats, weights: Floats, total: int) -> float:
    """Share per weight: `total` is used up if each gets its weight times this, and none more than it wants."""
    per_weight = wanted / weights
    left, open_weight, level = float(total), float(weights.sum()), 0.0
    for at in per_weight.argsort().tolist():
        level = max(level, left / open_weight)
        if per_weight[at] > level:
            break
        left -= float(wanted[at])
        open_weight -= float(weights[at])
        if open_weight <= 1e-9:
            return max(level, float(per_weight.max()))
    return level
