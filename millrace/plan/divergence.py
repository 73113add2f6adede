"""Where a prompt leaves what was cached when it was admitted, for `explain`.

What is compared is noted then. It is compared when somebody asks, since few requests are ever explained.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

TOKENS_AROUND = 24
"""Own tokens kept on each side of the one where a prompt diverged."""
TOKENS_COMPARED = 4
"""Tokens of a cached block that are looked for later in a prompt that diverged from it."""
MAX_TOKENS_KEPT = 1024
"""Longer prompts are compared at once: to keep them for later would take more memory than it saves time."""


@dataclass(frozen=True, slots=True)
class Diverged:
    at: int
    """Index of the first prompt token that differs from the cached block at that position."""
    around: bytes
    """Own tokens around that one, as int32 bytes."""
    around_from: int
    """Index of the first of them."""
    is_reordered: bool
    """True if what the cached block has there comes later in the prompt."""


class Divergence:
    __slots__ = ("_block_size", "_cached", "_found", "_history", "_start")

    def __init__(self, history: bytes, start: int, block_size: int, cached: Sequence[bytes]) -> None:
        """`history`: the prompt, as int32 bytes. `start`: tokens that matched. `cached`: tokens of the blocks that
        follow these in the cache, the last filled first."""
        self._history, self._start, self._block_size, self._cached = history, start, block_size, cached
        self._found: Diverged | None = None
        if len(history) > 4 * MAX_TOKENS_KEPT:
            self.found()

    def found(self) -> Diverged | None:
        """None if no cached block differs from the prompt."""
        if self._cached:
            self._found = self._compare()
            self._history, self._cached = b"", ()
        return self._found

    def _compare(self) -> Diverged | None:
        start, history = self._start, self._history
        own = history[4 * start : 4 * (start + self._block_size)]
        length, best = nearest(own, self._cached)
        if 4 * length == len(own):
            return None
        at, first = start + length, max(0, start + length - TOKENS_AROUND)
        wanted = best[4 * length : 4 * (length + TOKENS_COMPARED)]
        is_reordered = len(wanted) == 4 * TOKENS_COMPARED and _holds(history, wanted, 4 * at)
        return Diverged(at, history[4 * first : 4 * (at + TOKENS_AROUND)], first, is_reordered)


def nearest(own: bytes, cached: Sequence[bytes]) -> tuple[int, bytes]:
    """Of these blocks the one with which most of `own` tokens agree: how many do, and its tokens. Among equals the
    first. -1 if there is none."""
    length, best, better = -1, b"", b""
    for tokens in cached:
        if tokens.startswith(better):
            length, best = num_common(own, tokens), tokens
            better = own[: 4 * (length + 1)]
    return length, best


def num_common(first: bytes, second: bytes) -> int:
    """Leading tokens that are equal."""
    pairs = zip(memoryview(first).cast("i"), memoryview(second).cast("i"), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _holds(history: bytes, tokens: bytes, start: int) -> bool:
    """True if the tokens are in the history, from byte `start` on."""
    at = history.find(tokens, start)
    while at % 4 and at >= 0:
        at = history.find(tokens, at + 1)
    return at >= 0
