"""Finds earlier occurrences of the last tokens of a text, in constant time.

Hash chains: a table holds the latest position of each pair of tokens, by hash, and every position links to the one
before it with the same hash. 12 to 20 bytes per token; a token is added in constant time, amortised.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np

from millrace.plan.step import Int32s, Int64s

MIN_MATCH = 2
"""Tokens that must be equal for a match: the pair that is hashed."""
MAX_CANDIDATES = 64
"""Places that are compared to find the longest match: the latest ones."""
MAX_COMPARED = 64
"""Tokens that are compared at each place."""
MAX_SINGLE = 4096
"""Tokens that are searched for a single one: the latest."""
_FIRST_SIZE = 256
_FEW, _FEW_PLACES = 40, 8
"""Below this many tokens to add, or places to compare, a Python loop beats NumPy calls: a step has displaced their code
and data from the caches."""
_Tokens = TypeVar("_Tokens", int, Int64s)
_BACK = np.arange(MAX_COMPARED)


@dataclass(slots=True)
class Match:
    """The end of a row's text equals `length` tokens before `position` of `text`."""

    position: int
    length: int
    resumed: bool = False
    """The token before `position` differs; `length` was the length until there."""
    is_common: bool = False
    """The only token that is equal occurs at other places too."""


class TextIndex:
    """Of a text that only grows. The text itself is given to each call."""

    def __init__(self) -> None:
        self.length = 0
        """Tokens added so far."""
        self._heads = np.full(_FIRST_SIZE, -1, np.int32)
        """By hash: position of the last token of the latest pair; -1: none."""
        self._before = np.zeros(_FIRST_SIZE, np.int32)
        """By position: the previous one with the same hash, or -1."""

    def extend(self, text: Int32s) -> None:
        """Add the tokens of `text` beyond those added before."""
        first, end = max(1, self.length), len(text)
        if end <= self.length:
            return
        self.length = end
        if end > len(self._heads):
            self._grow(end)
            first = 1
        if end - first < _FEW:
            heads, before, mask = self._heads, self._before, len(self._heads) - 1
            for position, pair in enumerate(pairwise(text[first - 1 : end].tolist()), first):
                at = _hash(*pair) & mask
                before[position] = heads[at]
                heads[at] = position
        else:
            wide = text[first - 1 : end].astype(np.int64)
            self._link(first, _hash(wide[:-1], wide[1:]) & (len(self._heads) - 1))

    def find(self, text: Int32s, tail: Int32s) -> Match | None:
        """The longest match of the end of `tail` that something follows in `text`, all of which was added; of those
        equally long the latest."""
        if len(tail) < MIN_MATCH or len(text) <= MIN_MATCH:
            return None
        found = self._candidates(tail, len(text) - 2)
        if not found:
            return None
        if len(found) <= _FEW_PLACES:
            length, at = max((_num_equal(text, end, tail), end) for end in found)  # of several the latest place
            return Match(at + 1, length) if length >= MIN_MATCH else None
        ends = np.array(found, np.int64)
        span = min(len(tail), MAX_COMPARED)
        places = ends[:, None] - _BACK[:span]
        is_equal = (text[np.maximum(places, 0)] == tail[len(tail) - span :][::-1]) & (places >= 0)
        lengths = np.where(is_equal.all(axis=1), span, is_equal.argmin(axis=1))
        best = int(lengths.argmax())  # the first of several: the latest place
        return Match(int(ends[best]) + 1, int(lengths[best])) if lengths[best] >= MIN_MATCH else None

    def _candidates(self, tail: Int32s, last: int) -> list[int]:
        """Places up to `last` where the pair may end, the latest first."""
        found: list[int] = []
        at = int(self._heads[_hash(int(tail[-2]), int(tail[-1])) & (len(self._heads) - 1)])
        for _ in range(MAX_CANDIDATES):
            if at < 0:
                break
            if at <= last:
                found.append(at)
            at = int(self._before[at])
        return found

    def _grow(self, length: int) -> None:
        size = 1 << (2 * length - 1).bit_length()
        self._heads = np.full(size, -1, np.int32)
        self._before = np.zeros(size, np.int32)

    def _link(self, first: int, hashes: Int64s) -> None:
        """`hashes` of the pairs that end at position `first` and later."""
        order = np.argsort(hashes, kind="stable")
        ordered, positions = hashes[order], (order + first).astype(np.int32)
        is_first = np.ones(len(order), np.bool_)
        is_first[1:] = ordered[1:] != ordered[:-1]
        before = np.empty(len(order), np.int32)
        before[1:] = positions[:-1]
        before[is_first] = self._heads[ordered[is_first]]
        self._before[positions] = before
        # The last write to an entry stays: the latest position.
        is_last = np.append(is_first[1:], True)
        self._heads[ordered[is_last]] = positions[is_last]


def find_single(text: Int32s) -> Match | None:
    """Where the last token of the text occurs before, at the latest of these places."""
    first = max(0, len(text) - MAX_SINGLE)
    places = np.flatnonzero(text[first:-1] == text[-1])
    return Match(first + int(places[-1]) + 1, 1, is_common=len(places) > 1) if len(places) else None


def _num_equal(text: Int32s, end: int, tail: Int32s) -> int:
    """How many tokens up to `end` equal the last ones of the tail."""
    most, count = min(end + 1, len(tail), MAX_COMPARED), 0
    while count < most and text[end - count] == tail[-1 - count]:
        count += 1
    return count


def _hash(first: _Tokens, second: _Tokens) -> _Tokens:
    mixed = first * 1000003 + second * 7919
    return mixed ^ (mixed >> 15)
