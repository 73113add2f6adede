"""When rows look for drafts in their text: in every step, or seldom where the last drafts were wrong or missing.

A step that looks takes longer, found or not: the search, and what the host cannot know in advance. Text that repeats
nothing should not pay for that with every token.
"""

from __future__ import annotations

import numpy as np

from millrace.plan.step import Bools, Int64s

PERIODS = np.array([1, 1, 1, 2, 4, 8, 16, 32])
"""Steps between two looks of a row, by the number of looks in a row that gave no token. Powers of two: rows that look
seldom do so in the same steps."""


class Looks:
    def __init__(self, capacity: int) -> None:
        self._misses = np.zeros(capacity, np.int64)
        """By row: looks since the last one that gave a token."""
        self._request_ids = np.full(capacity, -1, np.int64)
        self._step = 0

    def due(self, rows: Int64s, request_ids: Int64s) -> Bools:
        """Whether each row looks in the next step."""
        self._step += 1
        is_new = self._request_ids[rows] != request_ids
        if is_new.any():
            new = rows[is_new]
            self._request_ids[new], self._misses[new] = request_ids[is_new], 0
        found: Bools = self._step % PERIODS[self._misses[rows]] == 0
        return found

    def observe(self, rows: Int64s, accepted: Bools) -> None:
        """These rows looked; `accepted`: those that got at least one token."""
        self._misses[rows] = np.where(accepted, 0, np.minimum(self._misses[rows] + 1, len(PERIODS) - 1))

    def steps_without(self, rows: Int64s) -> int:
        """Steps from now in which none of these rows looks."""
        period = int(PERIODS[self._misses[rows]].min())
        return period - 1 - self._step % period

    def skip(self) -> None:
        """A step passed in which no row is due."""
        self._step += 1
