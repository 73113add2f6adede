"""Drafts from a client's prediction: what follows in it, from where the answer has got to."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

import numpy as np

from millrace.plan.step import Admission, Int32s, Int64s
from millrace.run.drafting.drafter import DraftAsk, Drafter, RowProgress
from millrace.run.drafting.ngram import MAX_NGRAM, MIN_NGRAM
from millrace.run.drafting.odds import Odds

MAX_LOOK_BACK = 32
"""Tokens that are compared to choose between several places."""
MAX_PLACES = 64
"""Places that are compared: those further on in the prediction."""
PRIOR = 0.8
"""Assumed acceptance of a draft."""
_NONE = np.zeros(0, np.int32)


class PredictionDrafter(Drafter):
    def __init__(self) -> None:
        self._predictions: dict[int, Int32s] = {}
        """By row: what its client expects the answer to contain."""
        self._odds = Odds((PRIOR,))

    def admit(self, admission: Admission) -> None:
        self._predictions.pop(admission.row, None)
        if prediction := admission.row_params.params.prediction:
            self._predictions[admission.row] = np.array(prediction, np.int32)
            self._odds.admit(admission.row)

    def has(self, row: int) -> bool:
        return row in self._predictions

    def propose(self, asks: Sequence[DraftAsk]) -> list[Int32s]:
        return [
            propose_predicted(
                self._predictions[ask.row], ask.tokens[ask.num_prompt :], self._odds.num_drafts(ask, repeat(0))
            )
            for ask in asks
        ]

    def confirm(self, rows: Sequence[RowProgress]) -> None:
        for progress in rows:
            self._odds.learn(progress)


def propose_predicted(prediction: Int32s, output: Int32s, max_drafts: int) -> Int32s:
    """Up to `max_drafts` tokens of the prediction that follow the last tokens of the output.

    An answer is expected to begin as the prediction does. Later, the place is where most tokens before it are equal.
    """
    num_output = len(output)
    if num_output < MIN_NGRAM:
        is_prefix = np.array_equal(prediction[:num_output], output)
        return prediction[num_output : num_output + max_drafts] if is_prefix else _NONE
    for length in range(min(MAX_NGRAM, num_output), MIN_NGRAM - 1, -1):
        starts = _matches(prediction, output[-length:])
        if len(starts):
            ends = (starts[-MAX_PLACES:] + length).tolist()
            first: int = max(ends, key=lambda end: _num_equal(prediction[:end], output))
            return prediction[first : first + max_drafts]
    return _NONE


def _matches(text: Int32s, pattern: Int32s) -> Int64s:
    """Where the pattern occurs, unless nothing follows it."""
    num_starts = len(text) - len(pattern)
    if num_starts <= 0:
        return np.zeros(0, np.int64)
    is_match = text[:num_starts] == pattern[0]
    for offset in range(1, len(pattern)):
        is_match &= text[offset : offset + num_starts] == pattern[offset]
    starts: Int64s = is_match.nonzero()[0]
    return starts


def _num_equal(before: Int32s, output: Int32s) -> int:
    """How many of the last tokens are equal."""
    length = min(len(before), len(output), MAX_LOOK_BACK)
    differ = np.flatnonzero(before[len(before) - length :] != output[len(output) - length :])
    return length - 1 - int(differ[-1]) if len(differ) else length
