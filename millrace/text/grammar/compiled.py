"""A compiled grammar: makes the matchers of answers, spread over several lexers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from llguidance import LLMatcher

from millrace.text.grammar.matcher import Lexer, Matcher

MAX_GROWING_S = 0.05
"""CPU time. A grammar that takes longer to compile keeps one lexer."""


class CompiledGrammar:
    """Ready to be followed by any number of answers. All methods but `grow` belong to one thread.

    Matchers that are copies of one share its lexer, which has a lock: their masks are computed one after the other. So
    answers that run at the same time are spread over several lexers, each of which is compiled anew.
    """

    def __init__(
        self, build: Callable[[], LLMatcher], num_words: int, end_token_ids: tuple[int, ...], max_lexers: int
    ) -> None:
        """`build` compiles; the result may have an error."""
        began = time.thread_time()
        self.build = build
        self._num_words = num_words
        self._end_token_ids = end_token_ids
        self._lexers = [Lexer(build())]
        self._max_lexers = max_lexers if time.thread_time() - began < MAX_GROWING_S else 1
        self._grown: Lexer | None = None
        self.begins_with: Sequence[int] = ()
        """Tokens with which every answer begins."""

    @property
    def first(self) -> LLMatcher:
        return self._lexers[0].first

    def matcher(self) -> Matcher:
        """A matcher at the beginning of an answer, which must be released when the answer ends."""
        lexer = min(self._lexers, key=lambda lexer: len(lexer.matchers))
        return Matcher(lexer, self._num_words, self._end_token_ids, self.begins_with)

    @property
    def is_crowded(self) -> bool:
        """True if another lexer would let masks be computed in parallel."""
        return len(self._lexers) < self._max_lexers and any(len(lexer.matchers) > 1 for lexer in self._lexers)

    def grow(self) -> None:
        """Compile another lexer. May run in any thread; `spread` takes it into use."""
        self._grown = Lexer(self.build())

    def spread(self) -> None:
        """Let the new lexer take over answers that have just begun from the others."""
        if self._grown is None:
            return
        lexer, self._grown = self._grown, None
        if lexer.first.is_error():  # What compiled once has failed now: the others serve on.
            self._max_lexers = len(self._lexers)
            return
        self._lexers.append(lexer)
        share = sum(len(other.matchers) for other in self._lexers) // len(self._lexers)
        movable = (matcher for matcher in self._others(lexer) if matcher.can_move)
        for matcher in movable:
            if len(lexer.matchers) >= share:
                break
            if len(matcher.lexer.matchers) > share:
                matcher.move_to(lexer)

    def _others(self, lexer: Lexer) -> Iterable[Matcher]:
        return [matcher for other in self._lexers if other is not lexer for matcher in other.matchers]
