"""The tokens that end each running request, as columns over the table rows."""

from __future__ import annotations

import numpy as np

from millrace.plan.request import Request
from millrace.plan.step import Int32s, Int64s

NO_TOKEN = -1


class EndTokens:
    def __init__(self, capacity: int) -> None:
        self._tokens: Int32s = np.full((1, capacity), NO_TOKEN, np.int32)
        """[most end tokens of a row so far, rows]"""
        self._from = np.zeros(capacity, np.int32)
        """Number of known tokens (prompt and minimum of output) from which they end the request."""
        self._num_rows = 0
        """Active rows with end tokens."""
        self._num_late = 0
        """Those of them with a minimum of output."""

    def set(self, row: int, request: Request) -> None:
        """The request gets this row."""
        token_ids = request.end_token_ids
        if not token_ids:
            return
        if len(token_ids) > len(self._tokens):
            further = np.full((len(token_ids) - len(self._tokens), self._tokens.shape[1]), NO_TOKEN, np.int32)
            self._tokens = np.concatenate([self._tokens, further])
        self._tokens[: len(token_ids), row] = token_ids
        self._num_rows += 1
        if request.min_tokens:
            self._num_late += 1
        self._from[row] = request.num_prompt + request.min_tokens

    def clear(self, row: int, request: Request) -> None:
        """The request leaves it."""
        if request.end_token_ids:
            self._tokens[:, row] = NO_TOKEN
            self._num_rows -= 1
            self._num_late -= request.min_tokens > 0

    def in_effect(self, table_rows: Int64s, positions: Int32s) -> tuple[Int32s | None, bool]:
        """What would end each of these rows if it were drawn at these positions: [end tokens, rows], None if nothing
        would end any. And whether some row ignores its end tokens because it is still too short."""
        if not self._num_rows:
            return None, False
        tokens: Int32s = self._tokens.take(table_rows, axis=1)
        if not self._num_late:
            return tokens, False
        too_early = positions < self._from[table_rows]
        hides = bool(too_early.any())
        if hides:
            tokens[:, too_early] = NO_TOKEN
        return tokens, hides
