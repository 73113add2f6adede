"""Compiles grammars in threads and remembers the results.

Compiling takes milliseconds, for large schemas seconds, and cannot be interrupted: whoever waits for a result sets a
time limit. llguidance bounds the work of one grammar. This module does not import llguidance, which takes up to 0.4 s:
the first grammar does, in its thread.
"""

from __future__ import annotations

import resource
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from millrace.errors import Overloaded
from millrace.params.grammar import Grammar

NUM_THREADS = 2
MAX_PENDING = 256
"""Grammars that may wait to be compiled."""
MAX_PENDING_PER_SCOPE = 32
"""Of one tenant."""
MAX_CACHED = 256
MAX_CACHED_BYTES = 2 << 20
"""Of the sources of cached grammars."""
BYTES_PER_SOURCE_BYTE = 100
"""What a compiled grammar usually takes at most. One that takes more counts as a longer source."""

_T = TypeVar("_T")
_Key = tuple[str, Grammar]


class GrammarError(Exception):
    """A grammar cannot be used or followed. The text is a sentence for the client."""


@dataclass(frozen=True, slots=True)
class Unusable:
    """The grammar has an error. The message is a sentence for the client."""

    message: str


@dataclass(slots=True)
class _Order(Generic[_T]):
    """A grammar that is compiled, or waits for it."""

    scope: str
    grammar: Grammar
    result: Future[_T | Unusable] = field(default_factory=Future)
    num_bytes: int = 0
    """What it takes, as far as it is known: its source at least."""


class GrammarCompiler(Generic[_T]):
    """`build` compiles one grammar and raises `GrammarError` if it cannot be used. `submit` belongs to one thread.

    Scopes take turns, and one scope never keeps all threads busy: grammars that are slow to compile delay their own
    tenant only.
    """

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
        self._cached: OrderedDict[_Key, _Order[_T]] = OrderedDict()
        self._lock = threading.Lock()
        """Guards what follows."""
        self._waiting: OrderedDict[str, deque[_Order[_T]]] = OrderedDict()
        """By scope; the first scope's turn is next."""
        self._running: Counter[str] = Counter()
        self.num_compiled = 0
        self.num_hits = 0

    def submit(self, grammar: Grammar, scope: str = "") -> Future[_T | Unusable]:
        """The result, which may still be on its way. A caller must not cancel it: others may wait for it too.

        Results are shared only within a scope, so that no tenant can measure which schemas another one uses.
        """
        key = (scope, grammar)
        known = self._cached.get(key)
        if known is not None and not _has_failed(known.result):
            self._cached.move_to_end(key)
            self.num_hits += 1
            return known.result
        if known is not None:
            del self._cached[key]
        order: _Order[_T] = _Order(scope, grammar, num_bytes=len(grammar.source))
        with self._lock:
            self._check_room(scope)
            self._waiting.setdefault(scope, deque()).append(order)
        self.num_compiled += 1
        self._cached[key] = order
        self._shrink()
        self._start()
        return order.result

    def _check_room(self, scope: str) -> None:
        own = self._running[scope] + len(self._waiting.get(scope, ()))
        num_all = self._running.total() + sum(map(len, self._waiting.values()))
        limit, whose = (MAX_PENDING_PER_SCOPE, "Of yours, ") if scope else (MAX_PENDING, "")
        if own >= limit or num_all >= MAX_PENDING:
            limit, whose = (limit, whose) if own >= limit else (MAX_PENDING, "")
            raise Overloaded(
                f"{whose}{limit} grammars are waiting to be compiled; try again in a few seconds.", retry_after_s=5
            )

    def _start(self) -> None:
        """Give free threads to the scopes whose turn it is."""
        with self._lock:
            while (order := self._next()) is not None:
                self._running[order.scope] += 1
                self._threads.submit(self._compile, order)

    def _next(self) -> _Order[_T] | None:
        if self._running.total() >= NUM_THREADS:
            return None
        for scope, orders in self._waiting.items():
            if self._running[scope] < (max(1, NUM_THREADS - 1) if scope else NUM_THREADS):
                order = orders.popleft()
                self._waiting.move_to_end(scope)
                if not orders:
                    del self._waiting[scope]
                return order
        return None

    def _compile(self, order: _Order[_T]) -> None:
        try:
            if order.result.set_running_or_notify_cancel():
                before = resident_bytes()
                try:
                    order.result.set_result(self._run(order.grammar))
                except BaseException as error:
                    order.result.set_exception(error)
                order.num_bytes += max(0, resident_bytes() - before) // BYTES_PER_SOURCE_BYTE
        finally:
            with self._lock:
                self._running[order.scope] -= 1
            with suppress(RuntimeError):  # The threads have been shut down.
                self._start()

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

    def _shrink(self) -> None:
        """Forget the least recently used beyond the limits, but not the newest."""
        num_bytes = sum(order.num_bytes for order in self._cached.values())
        while len(self._cached) > self._max_cached or (num_bytes > self._max_cached_bytes and len(self._cached) > 1):
            _, order = self._cached.popitem(last=False)
            num_bytes -= order.num_bytes

    def close(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, OrderedDict()
        for order in (order for orders in waiting.values() for order in orders):
            order.result.cancel()
        self._threads.shutdown(wait=False)
        self._on_close()


def _has_failed(future: Future[_T]) -> bool:
    """True if compiling raised something unexpected, such as an unreadable file: then it is tried again."""
    return future.done() and (future.cancelled() or future.exception() is not None)


def resident_bytes() -> int:
    """Memory of this process; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except (OSError, ValueError):
        return 0
