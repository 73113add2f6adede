"""A stand-in for the engine, for tests of the front only: it answers every request with a script, one token per step.

It sits at the far end of the channel, so the real `EngineClient` and everything before it are under test.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import msgspec
import numpy as np

from millrace.link.channel import OnMessage
from millrace.link.engine_stats import EngineStats
from millrace.link.forgotten import ForgottenTenant
from millrace.link.messages import (
    Abort,
    EndSearch,
    EngineFailed,
    EngineReady,
    EngineRetired,
    Finish,
    Idleness,
    NewRequest,
    Query,
    Reply,
    Retire,
    StepTokens,
    ToEngine,
    TokenLogprobs,
    unpack_tokens,
)
from millrace.observe.histograms import TTFT, Histograms
from millrace.params.classes import FinishReason
from millrace.plan.planner.protocol import BlockMap

VECTOR = np.array([0.6, 0.8], np.float32).tobytes()
"""What requests with `pooling` get."""

Script = Callable[[NewRequest], Iterable[int]]


class Row:
    def __init__(self, request: NewRequest, tokens: Iterator[int]) -> None:
        self.request = request
        self.tokens = tokens
        self.prompt = unpack_tokens(request.prompt).tolist()
        self.num_output = 0
        self.first_at = 0.0


class NullEngine:
    """`script` returns a request's tokens; after the last one comes the first end token, or the script repeats."""

    def __init__(
        self,
        script: Script,
        *,
        vocab_size: int,
        max_context: int = 4096,
        kv_tokens: int = 65536,
        step_s: float = 0.0,
        is_ready: bool = True,
    ) -> None:
        self.script = script
        self.ready = EngineReady(
            model_name="null",
            max_context=max_context,
            vocab_size=vocab_size,
            kv_tokens=kv_tokens,
            block_size=16,
            dtype="float32",
            device="null",
            memory_plan={},
            fingerprint="fp_null",
            num_parameters=134_515_008,
        )
        self.step_s = step_s
        self.is_ready = is_ready
        self.paused = False
        self.late_s = 0.0
        """Added to the clock that deadlines are held to, so that a test decides when one has passed."""
        self.used_at = time.monotonic()
        self.is_retired = False
        self.received: list[NewRequest] = []
        self.searches: list[EndSearch] = []
        self.aborted: list[tuple[int, FinishReason]] = []
        self.ended: dict[int, FinishReason] = {}
        self.poison: set[int] = set()
        self.rows: dict[int, Row] = {}
        self._step_no = 0
        self._num_output = 0
        self.histograms = Histograms()
        self._finished: list[Finish] = []
        self._prompt_logprobs: dict[int, tuple[TokenLogprobs | None, ...]] = {}
        self._timer: asyncio.TimerHandle | asyncio.Handle | None = None

    # ── the channel's interface ───────────────────────────────────────────────────────────────────────────────────────
    def start(self, loop: asyncio.AbstractEventLoop, on_message: OnMessage) -> None:
        self._loop, self._on_message = loop, on_message
        if self.is_ready:
            loop.call_soon(on_message, self.ready)

    def send(self, message: ToEngine) -> None:
        if isinstance(message, NewRequest):
            self.received.append(message)
            row = Row(message, iter(self.script(message)))
            if message.resumed is not None:
                row.num_output = len(unpack_tokens(message.resumed.output))
                row.tokens = islice(row.tokens, row.num_output, None)
            self.rows[message.id] = row
            if message.params.prompt_logprobs is not None:
                self._prompt_logprobs[message.id] = self._score_prompt(row)
        elif isinstance(message, Abort):
            for request_id in message.ids:
                self.aborted.append((request_id, message.reason))
                row = self.rows.pop(request_id, None)
                if row is not None:
                    self._finish(row, message.reason)
        elif isinstance(message, EndSearch):
            self.searches.append(message)
        elif isinstance(message, Retire):
            self._retire(message)
        elif isinstance(message, Query):  # It keeps no history, so it finds no request, no step and no tenant's blocks.
            nothing = msgspec.json.encode(ForgottenTenant(0, 0, {}, is_erased=True))
            steps, states = b'{"object":"steps","num_steps":0}', {"device": {"in_use": 10, "cached": 30, "free": 60}}
            none = BlockMap(states=states, nodes=[], other_nodes=0, other_tokens=0, tokens=0, is_whole=True)
            answers = {"steps": steps, "forget": nothing, "block_map": msgspec.json.encode(none)}
            found = answers.get(message.kind, b"")
            self._loop.call_soon(self._on_message, Reply(message.query_id, found))
        self._schedule()

    def _retire(self, message: Retire) -> None:
        num_open = len(self.rows) + len(self._finished)
        idle_s = 0.0 if num_open else time.monotonic() - self.used_at
        is_retired = num_open == 0 and idle_s >= message.idle_s
        idleness = Idleness(is_retired, num_open, idle_s)
        self._loop.call_soon(self._on_message, Reply(message.query_id, msgspec.json.encode(idleness)))
        if is_retired:
            self.is_retired = True
            self._loop.call_soon(self._on_message, EngineRetired())

    def close(self) -> None:
        self.paused = True
        if self._timer is not None:
            self._timer.cancel()

    # ── for the tests ─────────────────────────────────────────────────────────────────────────────────────────────────
    def become_ready(self) -> None:
        self._on_message(self.ready)

    def die(self, message: str, *, lacks_memory: bool = False) -> None:
        self._on_message(EngineFailed(message, lacks_memory=lacks_memory))

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        self._schedule()

    # ── steps ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    def _schedule(self) -> None:
        if self._timer is None and not self.paused and (self.rows or self._finished):
            self._timer = (
                self._loop.call_later(self.step_s, self._step) if self.step_s else self._loop.call_soon(self._step)
            )

    def _step(self) -> None:
        self._timer = None
        if self.paused:
            return
        self._step_no += 1
        ids: list[int] = []
        tokens: list[int] = []
        logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
        for request_id, row in list(self.rows.items()):
            token_id = self._next_token(row)
            if token_id is not None:
                ids.append(request_id)
                tokens.append(token_id)
                if row.request.params.logprobs is not None:
                    logprobs[request_id] = (self.score(token_id, row.request.params.logprobs),)
        self._num_output += len(ids)
        message = StepTokens(
            step_no=self._step_no,
            ids=np.asarray(ids, dtype="<i8").tobytes(),
            tokens=np.asarray(tokens, dtype="<i4").tobytes(),
            finished=tuple(self._finished),
            logprobs=logprobs,
            prompt_logprobs=self._prompt_logprobs,
            stats=self.stats(),
        )
        self._finished, self._prompt_logprobs = [], {}
        self._on_message(message)
        self._schedule()

    def _next_token(self, row: Row) -> int | None:
        """The row's token of this step, or None if it ended without one."""
        request, now = row.request, time.monotonic()
        if request.id in self.poison:
            self._end(row, "error", message="The step that computed this request failed.")
            return None
        if request.deadline is not None and now + self.late_s > request.deadline:
            self._end(row, "deadline")
            return None
        row.first_at = row.first_at or now
        if request.params.max_tokens == 0:
            self._end(row, "stop")
            return None
        token_id = next(row.tokens, None)
        if token_id is None or token_id in request.end_token_ids:
            row.num_output += 1
            self._end(row, "stop", stop_token_id=token_id if token_id is not None else (*request.end_token_ids, 0)[0])
            return None
        row.num_output += 1
        if row.num_output == request.params.max_tokens:
            self._end(row, "length")
        return token_id

    def _end(self, row: Row, reason: FinishReason, *, stop_token_id: int = -1, message: str = "") -> None:
        del self.rows[row.request.id]
        self._finish(row, reason, stop_token_id=stop_token_id, message=message)

    def _finish(self, row: Row, reason: FinishReason, *, stop_token_id: int = -1, message: str = "") -> None:
        now, arrival = time.monotonic(), row.request.arrival
        self.ended[row.request.id] = reason
        self.used_at = now
        finish = Finish(
            id=row.request.id,
            reason=reason,
            message=message,
            stop_token_id=stop_token_id,
            cached_tokens=len(row.prompt) // 16 * 16,
            prompt_tokens=len(row.prompt),
            output_tokens=row.num_output,
            first_token_s=max(0.0, row.first_at - arrival),
            total_s=now - arrival,
            vector=VECTOR if row.request.params.pooling and reason == "stop" else b"",
        )
        self._finished.append(finish)
        if row.num_output:
            self.histograms.observe(TTFT, row.request.priority, row.first_at - (row.request.received or arrival))
        self.histograms.observe_finish(finish, row.request.priority, 0.0)

    def score(self, token_id: int, num_top: int) -> TokenLogprobs:
        top = tuple((token_id + i) % self.ready.vocab_size for i in range(num_top))
        return TokenLogprobs(token_id, -0.5, 1, top, tuple(-0.5 - i if i < 19 else -math.inf for i in range(num_top)))

    def _score_prompt(self, row: Row) -> tuple[TokenLogprobs | None, ...]:
        num_top = row.request.params.prompt_logprobs or 0
        return (None, *(self.score(token_id, num_top) for token_id in row.prompt[1:]))

    def stats(self) -> EngineStats:
        return EngineStats(
            step_no=self._step_no,
            running=len(self.rows),
            waiting=0,
            blocks_total=100,
            blocks_free=60,
            blocks_cached=30,
            prefix_hit_tokens=16,
            prefix_query_tokens=32,
            preemptions=0,
            prompt_tokens=32,
            output_tokens=self._num_output,
            step_seconds=0.5,
            plan_seconds=0.1,
            histograms=self.histograms.tobytes(),
            latencies=self.histograms.take_sketch(),
        )
