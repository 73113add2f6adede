"""How likely drafts are to be accepted, by their kind and in their row, and how many are therefore worth proposing.

A kind is whatever a drafter tells drafts apart by, such as the length of the text that matched. Kinds are learnt from
all rows. A row whose drafts fail more often than their kinds promise, or less often, is judged accordingly.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from millrace.run.drafting.drafter import DraftAsk, RowProgress

PRIOR_WEIGHT = 16.0
"""Drafts that what is assumed of a kind counts as."""
ROW_WEIGHT = 3.0
"""Failed drafts, as many as expected, that every row starts with."""
DECAY, ROW_DECAY = 0.995, 0.9
"""Weight of earlier drafts at each draft of the kind, and at each step of the row with drafts."""


@dataclass(slots=True)
class _Row:
    failed: float = ROW_WEIGHT
    expected: float = ROW_WEIGHT
    """Drafts that failed, and those that should have by their kinds, decayed."""
    kinds: list[int] = field(default_factory=list)
    """Of the drafts in the current step."""


class Odds:
    def __init__(self, prior: Sequence[float]) -> None:
        """`prior`: assumed probability that a draft is accepted, given those before it, by kind."""
        self._tried = [PRIOR_WEIGHT] * len(prior)
        self._accepted = [PRIOR_WEIGHT * probability for probability in prior]
        self._rows: dict[int, _Row] = {}

    def admit(self, row: int) -> None:
        self._rows[row] = _Row()

    def release(self, row: int) -> None:
        self._rows.pop(row, None)

    def probability(self, row: int, kind: int) -> float:
        """That a draft is accepted, given those before it."""
        state, rejected = self._rows[row], 1.0 - self._accepted[kind] / self._tried[kind]
        return 1.0 - min(1.0, rejected * state.failed / state.expected)

    def num_drafts(self, ask: DraftAsk, kinds: Iterable[int]) -> int:
        """How many drafts of these kinds, one after the other, are likely enough to be accepted; none if they promise
        less than another drafter's."""
        state, together, gain = self._rows[ask.row], 1.0, 0.0
        state.kinds = []
        for kind in islice(kinds, ask.max_drafts):
            together *= self.probability(ask.row, kind)
            if together < ask.min_probability:
                break
            gain += together - ask.min_probability
            state.kinds.append(kind)
        if gain < ask.min_gain:
            state.kinds = []
        return len(state.kinds)

    def learn(self, progress: RowProgress) -> None:
        """What became of the drafts proposed last. Those after the first rejected one say nothing."""
        state = self._rows[progress.row]
        tried = state.kinds[: min(progress.num_accepted + 1, progress.num_drafts)]
        state.kinds = []
        if not tried:
            return
        more = (1 - ROW_DECAY) * ROW_WEIGHT
        state.failed, state.expected = state.failed * ROW_DECAY + more, state.expected * ROW_DECAY + more
        for place, kind in enumerate(tried):
            is_accepted = place < progress.num_accepted
            state.expected += 1.0 - self._accepted[kind] / self._tried[kind]
            state.failed += not is_accepted
            self._tried[kind] = self._tried[kind] * DECAY + 1
            self._accepted[kind] = self._accepted[kind] * DECAY + is_accepted
