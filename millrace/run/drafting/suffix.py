"""Suffix drafts: what followed the longest text that equals the end of a row's text, in the row itself or in recent
answers of its tenant.

A row remembers where its text is being repeated. While the new tokens continue there, nothing is searched. Otherwise
an index finds the next place in constant time (text_index.py).
How many drafts there are follows from how long the match is and how often drafts of such matches were accepted, in
general and in this row.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from millrace.plan.step import Admission, Int32s
from millrace.run.drafting.drafter import DraftAsk, Drafter, RowProgress
from millrace.run.drafting.text_index import Match, TextIndex

MIN_RESUMED = 8
"""Length of a match from which on it is resumed one token later if a single token differs."""
MAX_SCOPE_TOKENS = 16_384
"""Recent answers that are kept for one scope."""
MAX_SCOPES = 64
"""Scopes with recent answers. The one unused for longest goes first; all together take at most 24 MiB."""

PRIOR = (0.0, 0.4, 0.35, 0.55, 0.75, 0.85, 0.9, 0.95)
"""Assumed acceptance of a draft, by length class: class 1 is a resumed match, class n a match of 2 ** (n - 1) tokens or
more."""
PRIOR_WEIGHT, ROW_WEIGHT = 16.0, 6.0
"""Drafts that the prior counts as, and that the length class counts as beside the row's own."""
DECAY, ROW_DECAY = 0.995, 0.9
"""Weight of earlier steps at each step with drafts of the class, or of the row."""
_NONE = np.zeros(0, np.int32)


def length_class(match: Match) -> int:
    return 1 if match.resumed else min(match.length.bit_length(), len(PRIOR) - 1)


@dataclass(slots=True)
class RecentAnswers:
    """The last answers of one scope, one after the other."""

    tokens: Int32s = field(default_factory=lambda: np.zeros(0, np.int32))
    index: TextIndex = field(default_factory=TextIndex)
    generation: int = 0
    """Changes when positions do."""

    def add(self, answer: Int32s) -> None:
        joined = np.concatenate([self.tokens, answer[-MAX_SCOPE_TOKENS:]])
        if len(joined) > MAX_SCOPE_TOKENS:
            # Half is dropped at once, so that positions change seldom.
            joined = joined[-MAX_SCOPE_TOKENS // 2 :]
            self.generation += 1
            self.index = TextIndex()
        self.tokens = joined
        self.index.extend(joined)


@dataclass(slots=True)
class _Row:
    scope: str
    num_prompt: int
    index: TextIndex = field(default_factory=TextIndex)
    """Of the row's own text; catches up when it is searched."""
    own: Match | None = None
    recent: Match | None = None
    generation: int = -1
    """Of the recent answers that `recent` is a place of."""
    drafted: int = 0
    """Length class of the drafts in the current step."""
    tried: float = 0.0
    accepted: float = 0.0
    """Drafts of this row, decayed."""


class SuffixDrafter(Drafter):
    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}
        self._recent: OrderedDict[str, RecentAnswers] = OrderedDict()
        """By scope: requests see each other's answers only if their prefix cache is shared too."""
        self._tried = np.full(len(PRIOR), PRIOR_WEIGHT)
        self._accepted = np.array(PRIOR) * PRIOR_WEIGHT

    def admit(self, admission: Admission) -> None:
        self._rows[admission.row] = _Row(admission.row_params.scope, admission.num_prompt)

    def release(self, row: int, tokens: Int32s, *, has_ended: bool) -> None:
        state = self._rows.pop(row, None)
        if state is None or not has_ended:
            return
        self._scope(state.scope).add(tokens[state.num_prompt :])
        while len(self._recent) > MAX_SCOPES:
            self._recent.popitem(last=False)

    def propose(self, asks: Sequence[DraftAsk]) -> list[Int32s]:
        return [self._propose(ask) for ask in asks]

    def _propose(self, ask: DraftAsk) -> Int32s:
        state, recent = self._rows[ask.row], self._recent.get(self._rows[ask.row].scope)
        if state.own is None or state.own.resumed:
            state.index.extend(ask.tokens)
            state.own = state.index.find(ask.tokens, ask.tokens) or state.own
        if recent is not None and (
            state.recent is None or state.recent.resumed or state.generation != recent.generation
        ):
            state.recent = recent.index.find(recent.tokens, ask.tokens) or self._resumable(state, recent)
            state.generation = recent.generation
        text, match = ask.tokens, state.own
        if recent is not None and state.recent is not None and (match is None or _is_better(state.recent, match)):
            text, match = recent.tokens, state.recent
        state.drafted = 0
        if match is None:
            return _NONE
        num_drafts = self._num_drafts(state, length_class(match), ask)
        if not num_drafts:
            return _NONE
        state.drafted = length_class(match)
        return _continuation(text, match.position, num_drafts, repeats=match is state.own)

    def _resumable(self, state: _Row, recent: RecentAnswers) -> Match | None:
        return state.recent if state.generation == recent.generation else None

    def _num_drafts(self, state: _Row, at: int, ask: DraftAsk) -> int:
        """As many as are likely enough to be accepted; none if they promise less than another drafter's."""
        probability = float(self._accepted[at] / self._tried[at])
        probability = (state.accepted + ROW_WEIGHT * probability) / (state.tried + ROW_WEIGHT)
        count, together, gain = 0, probability, 0.0
        while count < ask.max_drafts and together >= ask.min_probability:
            count += 1
            gain += together - ask.min_probability
            together *= probability
        return count if gain >= ask.min_gain else 0

    def confirm(self, rows: Sequence[RowProgress]) -> None:
        for progress in rows:
            state = self._rows[progress.row]
            if progress.num_drafts and state.drafted:
                self._learn(state, progress)
            new = progress.tokens[len(progress.tokens) - progress.num_new :].tolist()
            recent = self._recent.get(state.scope)
            state.own = _follow(state.own, progress.tokens, new)
            if recent is None or state.generation != recent.generation:
                state.recent = None
            else:
                state.recent = _follow(state.recent, recent.tokens, new)

    def _learn(self, state: _Row, progress: RowProgress) -> None:
        """Drafts after the first rejected one say nothing."""
        tried = min(progress.num_accepted + 1, progress.num_drafts)
        at = state.drafted
        self._tried[at] = self._tried[at] * DECAY + tried
        self._accepted[at] = self._accepted[at] * DECAY + progress.num_accepted
        state.tried = state.tried * ROW_DECAY + tried
        state.accepted = state.accepted * ROW_DECAY + progress.num_accepted

    def _scope(self, name: str) -> RecentAnswers:
        recent = self._recent.setdefault(name, RecentAnswers())
        self._recent.move_to_end(name)
        return recent


def _is_better(recent: Match, own: Match) -> bool:
    """A match in recent answers must be longer than one in the row's own text."""
    return (not recent.resumed, recent.length) > (not own.resumed, own.length)


def _follow(match: Match | None, text: Int32s, new: list[int]) -> Match | None:
    """The match after these tokens. A single token that differs interrupts a long one."""
    for token in new:
        if match is None or match.position >= len(text):
            return None
        if text[match.position] == token:
            match = Match(match.position + 1, 1 + (0 if match.resumed else match.length))
        elif match.resumed or match.length < MIN_RESUMED:
            return None
        else:
            match = Match(match.position + 1, match.length, resumed=True)
    return match if match is not None and match.position < len(text) else None


def _continuation(text: Int32s, position: int, count: int, *, repeats: bool) -> Int32s:
    """What follows in the text. `repeats`: the text continues as it does at `position`, also beyond its end."""
    found = text[position : position + count]
    if repeats and len(found) < count:
        found = np.resize(text[position:], count)
    return found
