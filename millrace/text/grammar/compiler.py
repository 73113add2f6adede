"""Compiles grammars in threads and remembers the results.

Compiling takes milliseconds, for large schemas seconds, and cannot be interrupted: whoever waits for a result sets a
time limit. llguidance bounds the work of one grammar. This module does not import llguidance, which takes up to 0.4 s:
the first grammar does, in its thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from millrace.errors import Overloaded
from millrace.params import Grammar

NUM_THREADS = 2
MAX_PENDING = 256
"""Grammars that may wait to be compiled."""
MAX_CACHED = 256
MAX_CACHED_BYTES = 2 << 20
"""Of the sources of cached grammars. A compiled one takes up to about a hundred times as much."""

_T = TypeVar("_T")
_Key = tuple[str, Grammar]


class GrammarError(Exception):
    """A grammar cannot be used or followed. The text is a sentence for the client."""


@dataclass(frozen=True, slots=True)
class Unusable:
    """The grammar has an error. The message is a sentence for the client."""

    message: str


class GrammarCompiler(Generic[_T]):
    """`build` compiles one grammar and raises `GrammarError` if it cannot be used. `submit` belongs to one thread."""

    def __init__(
        self,
        build: Callable[[Grammar], _T],
        *,
        max_cached: int = MAX_CACHED,
        max_cached_bytes: int = MAX_CACHED_BYTES,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_close` ends what `build` uses."""
        self._build = build
        self._on_close = on_close
        self._max_cached = max_cached
        self._max_cached_bytes = max_cached_bytes
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")
        self._cached: OrderedDict[_Key, Future[_T | Unusable]] = OrderedDict()
        self._cached_bytes = 0
        self._pending: set[Future[_T | Unusable]] = set()
        self.num_compiled = 0
        self.num_hits = 0

    def submit(self, grammar: Grammar, scope: str = "") -> Future[_T | Unusable]:
        """The result, which may still be on its way. A caller must not cancel it: others may wait for it too.

        Results are shared only within a scope, so that no tenant can measure which schemas another one uses.
        """
        key = (scope, grammar)
        known = self._cached.get(key)
        if known is not None and not _has_failed(known):
            self._cached.move_to_end(key)
            self.num_hits += 1
            return known
        if known is not None:
            self._drop(key)
        self._pending = {future for future in self._pending if not future.done()}
        if len(self._pending) >= MAX_PENDING:
            raise Overloaded(
                f"{MAX_PENDING} grammars are waiting to be compiled; try again in a few seconds.", retry_after_s=5
            )
        future = self._threads.submit(self._run, grammar)
        self.num_compiled += 1
        self._pending.add(future)
        self._remember(key, future)
        return future

    def run(self, work: Callable[[], None], done: Callable[[], None]) -> None:
        """Do other work in the same threads, then call `done` there, unless it failed."""

        def both() -> None:
            work()
            done()

        self._threads.submit(both)

    def _run(self, grammar: Grammar) -> _T | Unusable:
        try:
            return self._build(grammar)
        except GrammarError as error:
            return Unusable(str(error))

    def _remember(self, key: _Key, future: Future[_T | Unusable]) -> None:
        self._cached[key] = future
        self._cached_bytes += len(key[1].source)
        while len(self._cached) > self._max_cached or self._cached_bytes > self._max_cached_bytes:
            self._drop(next(iter(self._cached)))

    def _drop(self, key: _Key) -> None:
        del self._cached[key]
        self._cached_bytes -= len(key[1].source)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._on_close()


def _has_failed(future: Future[_T]) -> bool:
    """True if compiling raised something unexpected, such as an unreadable file: then it is tried again."""
    return future.done() and (future.cancelled() or future.exception() is not None)
