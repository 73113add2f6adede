"""The grammars of open requests: compiled in threads, advanced by each token, asked for masks before each draw.

A request keeps its matcher while it is preempted. An error ends only its own request. All methods belong to the
engine's thread; only compiling happens elsewhere. llguidance and the tokenizer are loaded with the first grammar.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from millrace.errors import MillraceError, Overloaded
from millrace.host.cores import usable_cores
from millrace.link.engine_stats import GrammarStats
from millrace.params.classes import FinishReason
from millrace.params.grammar import Grammar
from millrace.sources.resolve import ModelFiles
from millrace.text.grammar.compiler import GrammarCompiler, GrammarError, Unusable
from millrace.text.grammar.masks import ALL_TOKENS, MaskAsk, MaskBatch, Uint32s

if TYPE_CHECKING:
    from millrace.text.grammar.compiled import CompiledGrammar
    from millrace.text.grammar.environment import GrammarEnvironment
    from millrace.text.grammar.matcher import Matcher

log = logging.getLogger(__name__)

COMPILE_LIMIT_S = 30.0
"""The front has compiled the grammar before, within less."""
FIRST_LIMIT_S = 180.0
"""For grammars that come before the vocabulary is loaded, which takes long on a busy machine."""
MAX_MASK_THREADS = 12
MIN_PARALLEL = 16
"""Tokens of a step that are followed in threads."""
SLOW_MASKS_S = 0.02
"""After masks of a step that took longer, those of the next step are timed one by one."""
SLOW_MASK_S = 0.004
MAX_SLOW_S = 0.5
"""CPU time that a request may spend on slow masks. Its neighbours wait for them."""
NEVER = 1 << 31
"""As a number of tokens: the answer ends only where nothing else may follow."""
Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that must end with an error, and the sentence for its client."""

    request_id: int
    message: str
    reason: FinishReason = "refused"
    """What the request asks for cannot be done, or ("error") the server failed."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """The masked rows of a step, prepared."""

    request_ids: list[int]
    owners: list[int]
    """Those that have not failed: the requests of `masks`."""
    masks: MaskBatch
    free: list[tuple[int, int]]
    """First row and number of rows of those that have failed."""


class Grammars:
    """`open` a request's grammar, wait until `take_ready` names it, then `fill` and `consume` in turn, then `close`.

    `take_failed` names requests that must end; calls for them are harmless until `close`. `guide` may be called by
    another thread.
    """

    def __init__(self, load: Callable[[], GrammarEnvironment]) -> None:
        """`load` runs once, in a compile thread."""
        self._load = load
        self._lock = threading.Lock()
        self._environment: GrammarEnvironment | None = None
        self._compiler = GrammarCompiler(self._compile)
        self._compiled: deque[int] = deque()
        """Requests whose grammar has been compiled. Compile threads append; appending is atomic."""
        self._pending: dict[int, tuple[Future[CompiledGrammar | Unusable], float]] = {}
        """By request id: the result to come, and until when it is waited for."""
        self._growing: set[CompiledGrammar] = set()
        self._grown: deque[CompiledGrammar] = deque()
        """Those with a new lexer. Compile threads append."""
        self._matchers: dict[int, Matcher] = {}
        self._batch: _Batch | None = None
        """The last step's, if the next one may have the same rows."""
        self._following = threading.RLock()
        """Held by whoever uses matchers."""
        self._ends_from: dict[int, int] = {}
        """Tokens from which a request may end although more may follow, where that is not at once."""
        self._slow_s: dict[int, float] = {}
        """CPU time of slow masks by request."""
        self._times_each = False
        self._failed: list[Failure] = []
        self._num_failed = 0
        self._num_masks = 0
        self._mask_seconds = 0.0
        self._consume_seconds = 0.0
        self._compile_seconds = 0.0

    def __len__(self) -> int:
        """Number of requests that are opened and not closed."""
        return len(self._pending) + len(self._matchers)

    @property
    def counters(self) -> GrammarStats:
        return GrammarStats(
            masks=self._num_masks,
            mask_seconds=self._mask_seconds,
            consume_seconds=self._consume_seconds,
            compile_seconds=self._compile_seconds,
            compiled=self._compiler.num_compiled,
            cache_hits=self._compiler.num_hits,
            failures=self._num_failed,
        )

    # -- compiling -------------------------------------------------------------------------------------------------

    def open(self, request_id: int, grammar: Grammar, scope: str, now: float, ends_from: int = 0) -> None:
        """Start compiling. Compiled grammars are shared within a scope. `now` is in seconds. Before `ends_from` tokens
        the answer ends only where nothing else may follow."""
        if ends_from:
            self._ends_from[request_id] = ends_from
        try:
            future = self._compiler.submit(grammar, scope)
        except Overloaded as error:
            self._fail(request_id, error.message, "error")
            return
        limit_s = FIRST_LIMIT_S if self._environment is None else COMPILE_LIMIT_S
        self._pending[request_id] = (future, now + limit_s)
        future.add_done_callback(lambda _: self._compiled.append(request_id))

    def take_ready(self, now: float) -> list[int]:
        """Requests that have become ready since the last call. Never blocks."""
        with self._following:
            self._spread()
        ready = []
        while self._compiled:
            request_id = self._compiled.popleft()
            entry = self._pending.pop(request_id, None)
            if entry is not None and self._start(request_id, entry[0]):
                ready.append(request_id)
        if self._pending:
            self._fail_late(now)
        return ready

    def take_failed(self) -> list[Failure]:
        """Requests that have failed since the last call. Each is named once."""
        failed, self._failed = self._failed, []
        return failed

    def close(self, request_id: int) -> None:
        """Forget a request. Unknown ids are ignored."""
        self._pending.pop(request_id, None)
        self._drop(request_id)
        self._slow_s.pop(request_id, None)
        self._ends_from.pop(request_id, None)

    def shut_down(self) -> None:
        self._compiler.close()

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        with self._lock:
            if self._environment is None:
                self._environment = self._load()
        began = time.monotonic()
        try:
            return self._environment.compile(grammar)
        finally:
            with self._lock:
                self._compile_seconds += time.monotonic() - began

    def _start(self, request_id: int, future: Future[CompiledGrammar | Unusable]) -> bool:
        error = future.exception()
        if error is not None:
            log.error("a grammar could not be compiled", exc_info=error)
            reason = error.message if isinstance(error, MillraceError) else repr(error)
            self._fail(request_id, f"The grammar could not be compiled: {reason}", "error")
            return False
        result = future.result()
        if isinstance(result, Unusable):
            self._fail(request_id, result.message)
            return False
        self._matchers[request_id] = result.matcher()
        self._grow(result)
        return True

    def _grow(self, compiled: CompiledGrammar) -> None:
        """Let masks of answers with the same grammar be computed in parallel."""
        if compiled.is_crowded and compiled not in self._growing:
            self._growing.add(compiled)
            self._compiler.run(compiled.grow, lambda: self._grown.append(compiled))

    def _spread(self) -> None:
        while self._grown:
            compiled = self._grown.popleft()
            self._growing.discard(compiled)
            compiled.spread()
            self._batch = None
            self._grow(compiled)

    def _fail_late(self, now: float) -> None:
        for request_id in [request_id for request_id, (_, until) in self._pending.items() if now > until]:
            del self._pending[request_id]
            self._fail(
                request_id, "The grammar was not compiled in time: this server is too busy. Try again later.", "error"
            )

    def _fail(self, request_id: int, message: str, reason: FinishReason = "refused") -> None:
        self._num_failed += 1
        self._failed.append(Failure(request_id, message, reason))
        self._drop(request_id)

    def _drop(self, request_id: int) -> None:
        with self._following:
            matcher = self._matchers.pop(request_id, None)
            if matcher is not None:
                matcher.release()
                self._batch = None

    # -- decoding --------------------------------------------------------------------------------------------------

    def consume(self, request_ids: Sequence[int], tokens: Sequence[int]) -> None:
        """Advance by the tokens of a completed step, with the request of each. Requests without a grammar are
        ignored."""
        if not self._matchers:
            return
        began = time.monotonic()
        with self._following:
            self._consume(request_ids, tokens)
        self._consume_seconds += time.monotonic() - began

    def _consume(self, request_ids: Sequence[int], tokens: Sequence[int]) -> None:
        if self._batch is not None and self._batch.request_ids == request_ids:
            owners, matchers = request_ids, self._batch.masks.matchers
        else:
            found = [(one, token) for one, token in zip(request_ids, tokens, strict=True) if one in self._matchers]
            owners, tokens = [one for one, _ in found], [token for _, token in found]
            matchers = [self._matchers[request_id] for request_id in owners]
        is_once = len(set(owners)) == len(owners)
        if len(owners) >= MIN_PARALLEL and is_once and self._environment is not None:
            errors = self._environment.consume(matchers, tokens)
            for request_id, error in zip(owners, errors, strict=True):
                if error is not None:
                    self._fail(request_id, str(error))
        else:
            for request_id, token in zip(owners, tokens, strict=True):
                self._consume_one(request_id, token)

    def _consume_one(self, request_id: int, token: int) -> None:
        matcher = self._matchers.get(request_id)
        if matcher is not None:
            try:
                matcher.consume((token,))
            except GrammarError as error:
                self._fail(request_id, str(error))

    def fill(self, request_ids: Sequence[int], out: Uint32s, drafts: Sequence[Sequence[int]] | None = None) -> None:
        """Fill row i of `out` with the allowed next tokens of request i: bit `t % 32` of word `t // 32` for token t.
        With `drafts`, each request has a row more for every one of its drafts: the tokens allowed after it.

        A request that has failed may draw any token: its draw is discarded. Other threads can run meanwhile.
        """
        began = time.monotonic()
        has_drafts = drafts is not None and any(drafts)
        with self._following:
            batch = self._batch
            if has_drafts or batch is None or batch.request_ids != request_ids:
                batch = self._batch_of(request_ids, drafts or [()] * len(request_ids))
            for row, count in batch.free:
                out[row : row + count] = ALL_TOKENS
            if batch.masks.asks:
                self._fill(batch, out)
                self._withhold_ends(batch, out)
            self._batch = batch if not has_drafts and not batch.free and not self._failed else None
        self._num_masks += batch.masks.num_rows
        self._mask_seconds += time.monotonic() - began

    def _withhold_ends(self, batch: _Batch, out: Uint32s) -> None:
        """Remove end tokens from masks of answers that must go on as long as they can."""
        if not self._ends_from or self._environment is None:
            return
        rows: list[int] = []
        for request_id, ask in zip(batch.owners, batch.masks.asks, strict=True):
            num_early = self._ends_from.get(request_id, 0) - ask.matcher.num_consumed
            rows.extend(range(ask.first, ask.first + min(num_early, 1 + len(ask.drafts))))
        if rows:
            self._environment.withhold_ends(out, np.array(rows))

    def _batch_of(self, request_ids: Sequence[int], drafts: Sequence[Sequence[int]]) -> _Batch:
        asks: list[MaskAsk] = []
        owners: list[int] = []
        free: list[tuple[int, int]] = []
        row = 0
        for request_id, own in zip(request_ids, drafts, strict=True):
            matcher = self._matchers.get(request_id)
            if matcher is None:
                free.append((row, 1 + len(own)))
            else:
                asks.append(MaskAsk(matcher, row, own))
                owners.append(request_id)
            row += 1 + len(own)
        return _Batch(list(request_ids), owners, MaskBatch(asks), free)

    def guide(self, request_id: int, output: Int32s, drafts: Int32s, max_drafts: int) -> tuple[Int32s, bool]:
        """See `DraftGuide`. `output`: the request's tokens after its prompt, also those not consumed yet."""
        with self._following:
            matcher = self._matchers.get(request_id)
            if matcher is None:
                return drafts, False
            behind = output[matcher.num_consumed :].tolist()
            allowed, is_forced = matcher.guided(behind, drafts.tolist(), max_drafts)
            return np.array(allowed, np.int32), is_forced

    def forced(self, request_id: int) -> list[int]:
        """The tokens that must come next, one after the other."""
        matcher = self._matchers.get(request_id)
        return matcher.forced_tokens() if matcher is not None else []

    def _fill(self, batch: _Batch, out: Uint32s) -> None:
        assert self._environment is not None, "a matcher without an environment"
        began = time.monotonic()
        masks = batch.masks
        if self._times_each:
            errors = [self._fill_timed(one, ask, out) for one, ask in zip(batch.owners, masks.asks, strict=True)]
        else:
            errors = self._environment.fill_masks(masks, out)
        self._times_each = time.monotonic() - began > SLOW_MASKS_S
        if any(errors):
            for request_id, ask, error in zip(batch.owners, masks.asks, errors, strict=True):
                if error is not None:
                    self._fail(request_id, str(error))
                    ask.rows(out)[:] = ALL_TOKENS

    def _fill_timed(self, request_id: int, ask: MaskAsk, out: Uint32s) -> GrammarError | None:
        """A grammar whose masks stay slow ends its request: every step with that row would be late."""
        began = time.thread_time()
        error = ask.fill(out)
        took = time.thread_time() - began
        if error is None and took > SLOW_MASK_S * (1 + len(ask.drafts)):
            self._slow_s[request_id] = self._slow_s.get(request_id, 0.0) + took
            if self._slow_s[request_id] > MAX_SLOW_S:
                return GrammarError("The grammar takes too long to follow; simplify it.")
        return error


def make_grammars(files: ModelFiles, num_logits: int) -> Grammars:
    """`num_logits` is the width of the model's logits."""

    def load() -> GrammarEnvironment:
        from millrace.text.grammar.environment import load_environment  # Imports llguidance and tokenizers.

        return load_environment(files, num_logits, max(1, min(MAX_MASK_THREADS, usable_cores() // 2)))

    return Grammars(load)
