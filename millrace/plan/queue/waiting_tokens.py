"""Prompt tokens that stand in front of a new request: those that waiting requests have to compute, each prefix once.

A prefix that is cached, that a running request computes, or that an earlier waiting request begins with is not counted
again. Prompts are hashed when the count is asked for, so a request that is admitted at once costs nothing here.
"""

from __future__ import annotations

from typing import Protocol

from millrace.plan.kv.prefix import PrefixIndex
from millrace.plan.request import NUM_CLASSES, Request


class CountedTokens(Protocol):
    def add(self, request: Request) -> None: ...

    def remove(self, request: Request) -> None: ...

    def by_class(self) -> tuple[int, ...]: ...


class WholePrompts:
    """Where nothing is cached, every waiting prompt counts whole."""

    def __init__(self) -> None:
        self._by_class = [0] * NUM_CLASSES

    def add(self, request: Request) -> None:
        self._by_class[request.priority] += request.num_prompt

    def remove(self, request: Request) -> None:
        self._by_class[request.priority] -= request.num_prompt

    def by_class(self) -> tuple[int, ...]:
        return tuple(self._by_class)


class WaitingTokens:
    def __init__(self, prefix: PrefixIndex) -> None:
        self._prefix = prefix
        self._uncounted: dict[int, Request] = {}
        """Requests that were added since the last count, by id."""
        self._own: dict[int, tuple[list[bytes], int]] = {}
        """By id of a counted request: the hashes of the blocks that are its own, and its tokens from there on."""
        self._owned: set[bytes] = set()
        """Hashes of the blocks that counted requests own."""
        self._by_class = [0] * NUM_CLASSES

    def add(self, request: Request) -> None:
        self._uncounted[request.id] = request

    def remove(self, request: Request) -> None:
        """The request was admitted or ended. If it ended, its copies count too little until they are admitted."""
        if self._uncounted.pop(request.id, None) is not None:
            return
        hashes, num_tokens = self._own.pop(request.id)
        self._by_class[request.priority] -= num_tokens
        self._owned.difference_update(hashes)

    def by_class(self) -> tuple[int, ...]:
        for request in self._uncounted.values():
            first = self._prefix.num_expected(request, self._owned)
            hashes, num_tokens = request.hashes[first:], len(request.history) // 4 - first * self._prefix.block_size
            self._own[request.id] = (hashes, num_tokens)
            self._owned.update(hashes)
            self._by_class[request.priority] += num_tokens
        self._uncounted.clear()
        return tuple(self._by_class)
