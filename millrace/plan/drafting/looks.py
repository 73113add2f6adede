"""When rows look for drafts in their text: in every step, or seldom where the last drafts were wrong or missing.

A step that looks takes longer, found or not: the search, and what the host cannot know in advance. Text that repeats
nothing should not pay for that with every token.
"""

from __future__ import annotations

import numpy as np

from millrace.plan.step import Bools, Int64s

PERIODS = np.array([1, 1, 2, 4, 8, 16, 32])
"""Steps between two looks of a row, by the number of looks in a row that gave no token. Powers of two: rows that look
seldom do so in the same steps."""
STARTS = ((0.25, 0), (0.08, 3), (0.0, 5))
"""Where a new row begins in PERIODS: at the second number if the share of looks that gave a token is at least the
first. Among requests that repeat nothing, a new one is expected to be like them."""
LEARN = 1 / 16
"""Weight of a look in that share."""


class Looks:
    def __init__(self, capacity: int) -> None:
        self._misses = np.zeros(capacity, np.int64)
        """By row: looks since the last one that gave a token."""
        self._request_ids = np.full(capacity, -1, np.int64)
        self._useful = 0.5
        """Share of looks that gave a token, decayed."""
        self._step = 0

    def due(self, rows: Int64s, request_ids: Int64s) -> Bools:
        """Whether each row looks in the next step."""
        self._step += 1
        is_new = self._request_ids[rows] != request_ids
        if is_new.any():
            new = rows[is_new]
            start = next(misses for least, misses in STARTS if self._useful >= least)
            self._request_ids[new], self._misses[new] = request_ids[is_new], start
        found: Bools = self._step % PERIODS[self._misses[rows]] == 0
        return found

    def observe(self, rows: Int64s, accepted: Bools) -> None:
        """These rows looked; `accepted`: those that got at least one token."""
        for is_useful in accepted.tolist():
            self._useful += LEARN * (is_useful - self._useful)
        self._misses[rows] = np.where(accepted, 0, np.minimum(self._misses[rows] + 1, len(PERIODS) - 1))

    def steps_without(self, rows: Int64s) -> int:
        """Steps from now in which none of these rows looks."""
        period = int(PERIODS[self._misses[rows]].min())
        return period - 1 - self._step % period

    def skip(self) -> None:
        """A step passed in which no row is due."""
        self._step += 1
