"""What is asked of matchers before a draw. Imports no llguidance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from millrace.text.grammar.compiler import GrammarError

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from millrace.text.grammar.matcher import Matcher

ALL_TOKENS = np.uint32(0xFFFFFFFF)
Uint32s = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class MaskAsk:
    """Masks of one answer: that of its next token in row `first` of `out`, and in the rows after it one per draft."""

    matcher: Matcher
    first: int
    drafts: Sequence[int]

    def rows(self, out: Uint32s) -> Uint32s:
        return out[self.first : self.first + 1 + len(self.drafts)]

    def fill(self, out: Uint32s) -> GrammarError | None:
        try:
            self.matcher.fill_masks(self.rows(out), self.drafts)
        except GrammarError as error:
            return error
        return None


class MaskBatch:
    """The masks of a step, in the form that llguidance's threads take. It serves every step with the same rows."""

    def __init__(self, asks: Sequence[MaskAsk]) -> None:
        self.asks = asks
        self.matchers = [ask.matcher for ask in asks]
        self.num_rows = sum(1 + len(ask.drafts) for ask in asks)
        # Each thread takes a contiguous part: those that share a lexer should not wait for each other.
        in_order = sorted(asks, key=lambda ask: id(ask.matcher.lexer))
        self.plain = [ask for ask in in_order if not ask.drafts]
        self._plain_pairs: list[tuple[LLMatcher, int]] = [(ask.matcher.inner, ask.first) for ask in self.plain]
        self.drafted: list[tuple[LLMatcher, int, list[int]]] = [
            (ask.matcher.inner, ask.first, list(ask.drafts)) for ask in in_order if ask.drafts
        ]

    def unknown(self) -> list[tuple[LLMatcher, int]]:
        """Those without drafts whose next token is not known: matcher and row of each."""
        pairs = zip(self.plain, self._plain_pairs, strict=True)
        return [pair for ask, pair in pairs if not ask.matcher.known]
