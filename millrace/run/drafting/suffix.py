"""Suffix drafts: what followed the longest text that equals the end of a row's text, in the row itself or in recent
answers of its tenant.

A row remembers where its text is being repeated. While the new tokens continue there, nothing is searched. Otherwise
an index finds the next place in constant time (text_index.py).
How many drafts there are follows from how long the match is and how often drafts of such matches were accepted, in
general and in this row (odds.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from millrace.plan.step import Admission, Int32s
from millrace.run.drafting.drafter import DraftAsk, Drafter, RowProgress
from millrace.run.drafting.odds import Odds
from millrace.run.drafting.text_index import Match, TextIndex, find_single

MIN_RESUMED = 8
"""Length of a match from which on it is resumed one token later if a single token differs."""
MAX_SCOPE_TOKENS = 16_384
"""Recent answers that are kept for one scope."""
MAX_SCOPES = 64
"""Scopes with recent answers. The one unused for longest goes first; all together take at most 24 MiB."""

PRIOR = (0.1, 0.3, 0.4, 0.35, 0.55, 0.75, 0.85, 0.9, 0.95)
"""Assumed acceptance of a draft by kind: after a single token that occurs at several places, after one that occurs at
one, in a resumed match, then after matches of 2, 4, 8 ... tokens."""
COMMON, SINGLE, RESUMED, PAIR = range(4)
RESUMED_LENGTH = 4
"""A resumed match that goes on counts as one of so many tokens."""
_NONE = np.zeros(0, np.int32)


def kind_of(match: Match) -> int:
    if match.resumed:
        return RESUMED
    return _length_kind(match.length) if match.length > 1 else COMMON if match.is_common else SINGLE


def kinds_of(match: Match) -> Iterator[int]:
    """Of the first draft, the second ...: each one that is right makes the match longer."""
    yield kind_of(match)
    for length in count(_next_length(match)):
        yield _length_kind(length)


def _length_kind(length: int) -> int:
    return min(PAIR + length.bit_length() - 2, len(PRIOR) - 1)


def _next_length(match: Match) -> int:
    """Of the match with one more token."""
    return RESUMED_LENGTH if match.resumed else match.length + 1


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


class SuffixDrafter(Drafter):
    def __init__(self) -> None:
        self.rows: dict[int, _Row] = {}
        self.recent: OrderedDict[str, RecentAnswers] = OrderedDict()
        """By scope: requests see each other's answers only if their prefix cache is shared too."""
        self._odds = Odds(PRIOR)

    def admit(self, admission: Admission) -> None:
        self.rows[admission.row] = _Row(admission.row_params.scope, admission.num_prompt)
        self._odds.admit(admission.row)

    def release(self, row: int, tokens: Int32s, *, has_ended: bool) -> None:
        state = self.rows.pop(row, None)
        self._odds.release(row)
        if state is None or not has_ended:
            return
        self._scope(state.scope).add(tokens[state.num_prompt :])
        while len(self.recent) > MAX_SCOPES:
            self.recent.popitem(last=False)

    def propose(self, asks: Sequence[DraftAsk]) -> list[Int32s]:
        return [self._propose(ask) for ask in asks]

    def _propose(self, ask: DraftAsk) -> Int32s:
        state, recent = self.rows[ask.row], self.recent.get(self.rows[ask.row].scope)
        if state.own is None or state.own.resumed:
            state.own = self._find_own(state, ask)
        if recent is not None and (
            state.recent is None or state.recent.resumed or state.generation != recent.generation
        ):
            state.recent = recent.index.find(recent.tokens, ask.tokens) or self._resumable(state, recent)
            state.generation = recent.generation
        text, match = ask.tokens, state.own
        if recent is not None and state.recent is not None and (match is None or _is_better(state.recent, match)):
            text, match = recent.tokens, state.recent
        if match is None:
            return _NONE
        num_drafts = self._odds.num_drafts(ask, kinds_of(match))
        if not num_drafts:
            return _NONE
        return _continuation(text, match.position, num_drafts, repeats=match is state.own)

    def _find_own(self, state: _Row, ask: DraftAsk) -> Match | None:
        """The likeliest of a longer match, the interrupted one and a single token."""
        state.index.extend(ask.tokens)
        found = state.index.find(ask.tokens, ask.tokens) or find_single(ask.tokens)
        if found is None or state.own is None:
            return found or state.own
        return max(found, state.own, key=lambda match: self._odds.probability(ask.row, kind_of(match)))

    def _resumable(self, state: _Row, recent: RecentAnswers) -> Match | None:
        return state.recent if state.generation == recent.generation else None

    def confirm(self, rows: Sequence[RowProgress]) -> None:
        for progress in rows:
            state = self.rows[progress.row]
            self._odds.learn(progress)
            new = progress.tokens[len(progress.tokens) - progress.num_new :].tolist()
            recent = self.recent.get(state.scope)
            state.own = _follow(state.own, progress.tokens, new)
            if recent is None or state.generation != recent.generation:
                state.recent = None
            else:
                state.recent = _follow(state.recent, recent.tokens, new)

    def _scope(self, name: str) -> RecentAnswers:
        recent = self.recent.setdefault(name, RecentAnswers())
        self.recent.move_to_end(name)
        return recent


def _is_better(recent: Match, own: Match) -> bool:
    """A match in recent answers must be longer than one in the row's own text."""
    return (not recent.resumed, recent.length) > (not own.resumed and own.length > 1, own.length)


def _follow(match: Match | None, text: Int32s, new: list[int]) -> Match | None:
    """The match after these tokens. A single token that differs interrupts a long one."""
    for token in new:
        if match is None or match.position >= len(text):
            return None
        if text[match.position] == token:
            match = Match(match.position + 1, _next_length(match))
        elif match.resumed or match.length < MIN_RESUMED:
            return None
        else:
            match = Match(match.position + 1, match.length, resumed=True)
    return match if match is not None and match.position < len(text) else None


def _continuation(text: Int32s, position: int, num_drafts: int, *, repeats: bool) -> Int32s:
    """What follows in the text. `repeats`: the text continues as it does at `position`, also beyond its end."""
    found = text[position : position + num_drafts]
    if repeats and len(found) < num_drafts:
        found = np.resize(text[position:], num_drafts)
    return found
