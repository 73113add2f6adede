"""Follows one answer through its grammar and says which tokens may come next."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from millrace.text.grammar.compiler import GrammarError

Uint32s = npt.NDArray[np.uint32]

MAX_REPLAYED = 64
"""An answer with as many tokens stays with its lexer."""


def allow_only(row: Uint32s, token: int) -> None:
    """Let the mask allow this token only. Keeps the interpreter's lock: numpy would give it up to clear so many words,
    and wait for another thread to get it back."""
    row.data[:] = memoryview(bytes(row.nbytes)).cast("I")
    row[token // 32] = 1 << token % 32


class Lexer:
    """The part of a compiled grammar that its matchers share, behind a lock."""

    def __init__(self, first: LLMatcher) -> None:
        self.first = first
        """At the beginning of an answer."""
        self.matchers: set[Matcher] = set()
        """Those in use."""


class Matcher:
    """Used by one thread at a time. An error is final: every later call raises it again."""

    __slots__ = ("_consumed", "_end_token_ids", "_num_words", "inner", "known", "lexer", "num_consumed")

    def __init__(self, lexer: Lexer, num_words: int, end_token_ids: tuple[int, ...], known: Sequence[int] = ()) -> None:
        """`known`: tokens with which every answer begins."""
        self.lexer = lexer
        self.inner = lexer.first.deep_copy()
        """For llguidance's calls that take several matchers."""
        self._num_words = num_words
        self._end_token_ids = end_token_ids
        self._consumed: list[int] = []
        """Tokens so far, as long as they are few."""
        self.num_consumed = 0
        self.known = deque(known)
        """Tokens that must come next, as far as `forced_tokens` has found them. Their masks need no computing, which
        takes the longer the more text is forced: llguidance looks for its end before each token."""
        lexer.matchers.add(self)

    def release(self) -> None:
        """The answer has ended."""
        self.lexer.matchers.discard(self)

    @property
    def can_move(self) -> bool:
        return len(self._consumed) < MAX_REPLAYED and not self.inner.is_error()

    def move_to(self, lexer: Lexer) -> None:
        """Follow the answer with another lexer of the same grammar from here on."""
        moved = lexer.first.deep_copy()
        if not moved.consume_tokens(self._consumed):
            return
        self.release()
        self.lexer, self.inner = lexer, moved
        lexer.matchers.add(self)

    def consume(self, tokens: Sequence[int]) -> None:
        """Advance by tokens of the answer, end tokens included."""
        for token in tokens:
            if self.ends(token):
                continue
            if not self.inner.consume_token(token):
                raise GrammarError(self.problem)
            self.note(token)

    def ends(self, token: int) -> bool:
        """True if the token ends a complete answer: llguidance allows every end token, but may not consume it."""
        return token in self._end_token_ids and self.is_done

    def note(self, token: int) -> None:
        """The token was consumed."""
        self.num_consumed += 1
        if self.known and self.known.popleft() != token:
            self.known.clear()
        if len(self._consumed) < MAX_REPLAYED:
            self._consumed.append(token)

    def fill_mask(self, row: Uint32s) -> None:
        """Set bit `i % 32` of word `i // 32` for each token `i` that may come next, and clear all others.

        `row` may be wider or narrower than the vocabulary, as the model's logits may be.
        """
        if self.known and self.known[0] // 32 < len(row):
            allow_only(row, self.known[0])
        else:
            self._compute_mask(row)

    def _compute_mask(self, row: Uint32s) -> None:
        num_words, words = self._num_words, row
        if len(row) != num_words or not row.flags.c_contiguous:
            words = np.empty(num_words, np.uint32)
        self.inner.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if words is not row:
            shared = min(len(row), num_words)
            row[:shared] = words[:shared]
            row[shared:] = 0
        if error := self.error(bool(row.any())):
            raise error

    def fill_masks(self, rows: Uint32s, drafts: Sequence[int]) -> None:
        """Fill row i with the mask after the first i drafts. What is drawn after a refused draft is discarded: such
        rows allow everything."""
        num_consumed = 0
        self.fill_mask(rows[0])
        for draft in drafts:
            if not self.inner.try_consume_tokens([draft]):
                break
            num_consumed += 1
            self._compute_mask(rows[num_consumed])
        rows[num_consumed + 1 :] = 0xFFFFFFFF
        if num_consumed:
            self.inner.rollback(num_consumed)

    def forced_tokens(self) -> list[int]:
        """The tokens that must come next: before each, the mask has that token alone. May miss some."""
        if not self.known:
            self.known.extend(self.inner.compute_ff_tokens())
        return list(self.known)

    def guided(self, behind: Sequence[int], drafts: Sequence[int], max_drafts: int) -> tuple[list[int], bool]:
        """The first of the drafts, as far as they may follow the answer and the tokens `behind`, which it was not
        advanced by yet; end tokens are left out. Where other tokens must come: those, at most `max_drafts`, and True.
        """
        inner = self.inner
        num_consumed = inner.try_consume_tokens(list(behind))
        allowed: list[int] = []
        is_forced = False
        if num_consumed == len(behind) and not inner.is_stopped():
            forced = inner.compute_ff_tokens()[:max_drafts]
            is_forced = list(drafts[: len(forced)]) != forced
            allowed = forced if is_forced else list(drafts[: inner.validate_tokens(list(drafts))])
            end = next((at for at, token in enumerate(allowed) if token in self._end_token_ids), len(allowed))
            allowed = allowed[:end]
        if num_consumed:
            inner.rollback(num_consumed)
        return allowed, is_forced

    def error(self, has_tokens: bool) -> GrammarError | None:
        """Why the mask just computed cannot be used. No token can be drawn from a mask without one."""
        if self.inner.is_error():
            return GrammarError(self.problem)
        return None if has_tokens else GrammarError("The grammar allows no further token.")

    @property
    def is_done(self) -> bool:
        """True if the answer is complete: only end tokens may follow."""
        return self.inner.is_stopped() and not self.inner.is_error()

    @property
    def may_end(self) -> bool:
        """True if an end token may come next."""
        return self.inner.is_accepting()

    @property
    def problem(self) -> str:
        error = " ".join(self.inner.get_error().replace("<non-verbose/>", "").split())
        return f"The grammar cannot be followed any further: {error[:300].rstrip('.')}."
