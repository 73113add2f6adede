"""N-gram drafts: what followed the last tokens of a row when they last occurred in its prompt or output."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

import numpy as np

from millrace.plan.step import Admission, Int32s
from millrace.run.drafting.drafter import DraftAsk, Drafter, RowProgress
from millrace.run.drafting.odds import Odds

MAX_NGRAM, MIN_NGRAM = 3, 2
"""Tokens that must match, the longest first."""
PRIOR = 0.5
"""Assumed acceptance of a draft."""
_NONE = np.zeros(0, np.int32)


class NgramDrafter(Drafter):
    """Each proposal searches the row's tokens."""

    def __init__(self) -> None:
        self._odds = Odds((PRIOR,))

    def admit(self, admission: Admission) -> None:
        self._odds.admit(admission.row)

    def release(self, row: int, tokens: Int32s, *, has_ended: bool) -> None:
        self._odds.release(row)

    def propose(self, asks: Sequence[DraftAsk]) -> list[Int32s]:
        return [propose_ngram(ask.tokens, self._odds.num_drafts(ask, repeat(0))) for ask in asks]

    def confirm(self, rows: Sequence[RowProgress]) -> None:
        for progress in rows:
            self._odds.learn(progress)


def propose_ngram(history: Int32s, max_drafts: int) -> Int32s:
    """Up to `max_drafts` tokens that followed the latest earlier occurrence of the last tokens of `history`.

    Prefers the longest match. The continuation may run into the last tokens themselves, as in a repeated phrase.
    """
    for length in range(MAX_NGRAM, MIN_NGRAM - 1, -1):
        num_starts = len(history) - length
        if max_drafts <= 0 or num_starts <= 0:
            continue
        pattern = history[-length:]
        is_match = history[:num_starts] == pattern[0]
        for offset in range(1, length):
            is_match &= history[offset : offset + num_starts] == pattern[offset]
        starts = is_match.nonzero()[0]
        if len(starts):
            first = int(starts[-1]) + length
            return history[first : first + max_drafts]
    return _NONE
