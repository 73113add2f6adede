"""Drafts of running requests, as columns by table row and source: Python touches a row only when its request
ends or is explained."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from millrace.plan.step import Bools, Int32s, Int64s, StepPlan
from millrace.run.drafting.drafters import GRAMMAR, SOURCES
from millrace.run.protocol import StepResult

FORCED = SOURCES.index(GRAMMAR)
"""Source of drafts that came with the plan: a device does not know that."""
NO_REQUEST = -1
DraftCounts = dict[str, tuple[int, int, int]]
"""By drafter: steps that verified its drafts, drafts, and those accepted."""


@dataclass(frozen=True, slots=True)
class StepDrafts:
    """The rows of a step that had drafts, as columns."""

    rows: Int64s
    sources: Int32s
    num_drafts: Int32s
    num_accepted: Int32s


def step_drafts(plan: StepPlan, result: StepResult) -> StepDrafts | None:
    """None if no row had any."""
    if result.sources is None or result.num_drafts is None or result.counts is None:
        return None
    has = result.num_drafts > 0
    if not has.any():
        return None
    rows, sources = plan.rows[plan.samples][has].astype(np.int64), result.sources[has]
    for forced in plan.forced:
        sources[rows == forced.row] = FORCED
    return StepDrafts(rows, sources, result.num_drafts[has], result.counts[has] - 1)


def source_names(drafter: str) -> tuple[str, ...]:
    """By source. `drafter`: the engine's own."""
    return (drafter, *SOURCES[1:])


class RowDraftCounts:
    def __init__(self, capacity: int, drafter: str) -> None:
        self._names = source_names(drafter)
        self._request_ids = np.full(capacity, NO_REQUEST, np.int64)
        self._counts = np.zeros((3, len(SOURCES), capacity), np.int64)
        """Steps, drafts and accepted drafts."""
        self._has_any = False
        """True once a step had drafts. Without, nothing is looked up."""

    def admit(self, row: int, request_id: int) -> tuple[int, DraftCounts]:
        """The row changes hands. Returns the request that had it and what is not taken yet: a preempted one's."""
        before = int(self._request_ids[row]) if self._has_any else NO_REQUEST
        self._request_ids[row] = request_id
        return before, self._take(np.arange(len(self._request_ids)) == row) if self._has_any else {}

    def add(self, drafted: StepDrafts) -> None:
        self._has_any = True
        new = np.stack([np.ones_like(drafted.num_drafts), drafted.num_drafts, drafted.num_accepted])
        self._counts[:, drafted.sources, drafted.rows] += new

    def take(self, request_id: int) -> DraftCounts:
        """What was added since the last time. A request that was preempted may have had several rows."""
        return self._take(self._request_ids == request_id) if self._has_any else {}

    def _take(self, rows: Bools) -> DraftCounts:
        columns = zip(self._names, *self._counts[:, :, rows].sum(axis=2).tolist(), strict=True)
        self._counts[:, :, rows] = 0
        return {name: (one, two, three) for name, one, two, three in columns if one}
