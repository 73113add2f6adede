"""When rows look for drafts in their text: in every step while that pays, else seldom.

A step that looks takes longer, found or not: the search, and what the host cannot know in advance. Text that repeats
nothing should not pay for that with every token. An accepted draft saves as much time as several looks cost, so each
one pays for the row's next looks.
"""

from __future__ import annotations

import numpy as np

from millrace.plan.step import Bools, Int32s, Int64s

PERIODS = np.array([1, 1, 2, 4, 8, 16, 32])
"""Steps between two looks of a row whose credit is used up, by the number of looks since that gave no token. Powers of
two: rows that look seldom do so in the same steps."""
CREDIT, MAX_CREDIT = 2, 24
"""Looks without a token that one accepted draft pays for where one row decodes, and the most that a row may have paid
for. With more rows a step takes longer, so a look costs more tokens."""
STARTS = ((0.5, 0, 16), (0.25, 2, 0), (0.0, 6, 0))
"""Where a new row begins in PERIODS, and its credit: the second and third number if looks gave at least the first
number of tokens lately. Among requests that repeat nothing, a new one is expected to be like them."""
LEARN, MAX_TOKENS = 1 / 16, 2
"""Weight of a look in that number, and the most tokens that one look counts."""


class Looks:
    def __init__(self, capacity: int) -> None:
        self._misses = np.zeros(capacity, np.int64)
        """By row: looks since its credit was used up."""
        self._credit = np.zeros(capacity, np.int64)
        """By row: further looks that its accepted drafts have paid for."""
        self._request_ids = np.full(capacity, -1, np.int64)
        self.useful = STARTS[0][0]
        """Tokens that a look gave, decayed."""
        self._step = 0

    def due(self, rows: Int64s, request_ids: Int64s) -> Bools:
        """Whether each row looks in the next step."""
        self._step += 1
        is_new = self._request_ids[rows] != request_ids
        if is_new.any():
            new = rows[is_new]
            misses, credit = next((misses, credit) for least, misses, credit in STARTS if self.useful >= least)
            self._request_ids[new], self._misses[new] = request_ids[is_new], misses
            self._credit[new] = credit // len(rows)
        found: Bools = self._step % PERIODS[self._misses[rows]] == 0
        return found

    def observe(self, rows: Int64s, accepted: Int32s, num_rows: int) -> None:
        """These of the `num_rows` rows that decode looked, and had so many drafts accepted."""
        for num_tokens in accepted.tolist():
            self.useful += LEARN * (min(num_tokens, MAX_TOKENS) - self.useful)
        paid = max(1, CREDIT // num_rows)
        credit = np.where(accepted > 0, self._credit[rows] + paid * accepted, self._credit[rows] - 1)
        is_paid = (accepted > 0) | (credit >= 0)
        self._credit[rows] = np.clip(credit, 0, MAX_CREDIT)
        self._misses[rows] = np.where(is_paid, 0, np.minimum(self._misses[rows] + 1, len(PERIODS) - 1))

    def steps_without(self, rows: Int64s) -> int:
        """Steps from now in which none of these rows looks."""
        period = int(PERIODS[self._misses[rows]].min())
        return period - 1 - self._step % period

    def skip(self) -> None:
        """A step passed in which no row is due."""
        self._step += 1
