"""Limits on reasoning: after so many tokens the token that ends the reasoning is the only one allowed."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np
import numpy.typing as npt

from millrace.params.grammar import ThinkingLimit

MAX_TOKENS_BEFORE_START = 4
"""Reasoning that has not begun within this many tokens of an answer does not begin any more."""

Uint32s = npt.NDArray[np.uint32]


class _Thinking:
    """One request."""

    __slots__ = ("is_inside", "is_over", "limit", "num_tokens")

    def __init__(self, limit: ThinkingLimit) -> None:
        self.limit = limit
        self.is_inside = limit.is_open
        self.is_over = False
        self.num_tokens = 0
        """Since the reasoning began; before that, since the answer began."""

    def consume(self, token: int) -> None:
        if self.is_over:
            return
        self.num_tokens += 1
        if self.is_inside:
            self.is_over = token == self.limit.end_id
        elif token == self.limit.start_id:
            self.is_inside, self.num_tokens = True, 0
        else:
            self.is_over = self.num_tokens >= MAX_TOKENS_BEFORE_START

    @property
    def must_end(self) -> bool:
        return self.is_inside and not self.is_over and self.num_tokens >= self.limit.max_tokens


class ThinkingLimits:
    """`open` a request, then `consume` its tokens and `restrict` its masks in turn, then `close` it."""

    def __init__(self) -> None:
        self._requests: dict[int, _Thinking] = {}

    def open(self, request_id: int, limit: ThinkingLimit) -> None:
        self._requests[request_id] = _Thinking(limit)

    def close(self, request_id: int) -> None:
        """Unknown ids are ignored."""
        self._requests.pop(request_id, None)

    def consume(self, request_ids: Sequence[int], tokens: Sequence[int]) -> None:
        """Requests without a limit are ignored."""
        if self._requests:
            for request_id, token in zip(request_ids, tokens, strict=True):
                thinking = self._requests.get(request_id)
                if thinking is not None:
                    thinking.consume(token)

    def restrict(self, request_ids: Sequence[int], masks: Uint32s, drafts: Sequence[Sequence[int]]) -> None:
        """`masks` has a row with one bit per token for each request, and one more for each of its drafts."""
        if not self._requests:
            return
        row = 0
        for request_id, own in zip(request_ids, drafts, strict=True):
            if request_id in self._requests:
                self._restrict(copy(self._requests[request_id]), masks[row : row + 1 + len(own)], own)
            row += 1 + len(own)

    def _restrict(self, thinking: _Thinking, masks: Uint32s, drafts: Sequence[int]) -> None:
        end_id = thinking.limit.end_id
        for place, mask in enumerate(masks):
            if thinking.must_end:
                mask[:] = 0
                mask[end_id // 32] = np.uint32(1 << (end_id % 32))
            if place < len(drafts):
                thinking.consume(drafts[place])

    def must_end(self, request_id: int) -> bool:
        """True if the next token of the request must end its reasoning."""
        thinking = self._requests.get(request_id)
        return thinking is not None and thinking.must_end
