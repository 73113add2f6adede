"""A front's client of the engine: submits requests and calls back for each token and for the end.

Lives on one asyncio loop, where the callbacks run. Requests beyond the limits in `EngineReady` are rejected here and
cost the engine nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from millrace.errors import BadRequest, ContextOverflow, EngineUnavailable, Overloaded
from millrace.link.channel import FrontChannel
from millrace.link.messages import (
    FRONT_SHIFT,
    Abort,
    AbortFront,
    EngineFailed,
    EngineLoading,
    EngineReady,
    EngineStats,
    Finish,
    Hello,
    NewRequest,
    Query,
    Reply,
    StepTokens,
    ToFront,
    TokenLogprobs,
    pack_tokens,
    unpack_ids,
    unpack_tokens,
)
from millrace.params import FinishReason, SamplingParams

log = logging.getLogger(__name__)

STALL_S = 30.0
"""An engine with open requests that sends nothing for this long is not ready."""
QUERY_TIMEOUT_S = 10.0
INCARNATION_SHIFT = 32
"""Position of the front's restart count in request ids."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The tenant that submits a request, and the ids by which its client knows the request."""

    tenant: str = ""
    weight: float = 1.0
    names: tuple[str, ...] = ()
    received: float = 0.0
    """When the front had received the HTTP headers, on `time.monotonic`."""


ANONYMOUS = Caller()


class RequestSink(Protocol):
    """Callbacks for one request. `on_finish` is called exactly once, last."""

    def on_token(self, token_id: int, logprobs: TokenLogprobs | None) -> None: ...

    def on_prompt_logprobs(self, logprobs: tuple[TokenLogprobs | None, ...]) -> None: ...

    def on_finish(self, finish: Finish) -> None: ...


class EngineClient:
    def __init__(
        self,
        channel: FrontChannel,
        *,
        front_index: int = 0,
        incarnation: int = 0,
        max_open: int = 1 << 30,
        on_loading: Callable[[EngineLoading], None] | None = None,
    ) -> None:
        self.ready: EngineReady | None = None
        self.stats: EngineStats | None = None
        self.failure: str | None = None
        self.num_unreported = 0
        """Requests submitted since the last `EngineStats`, which therefore does not count them."""
        self.front_index = front_index
        self.num_engine_starts = 0
        self._channel = channel
        self._max_open = max_open
        self._on_loading = on_loading
        # A restarted front must not reuse ids that the engine may still know.
        self._next_id = (front_index << FRONT_SHIFT) + (incarnation << INCARNATION_SHIFT)
        self._queries: dict[int, asyncio.Future[bytes]] = {}
        self._next_query_id = 0
        self._sinks: dict[int, RequestSink] = {}
        self._changed = asyncio.Event()
        self._finish_times: deque[float] = deque(maxlen=256)
        self._last_progress = time.monotonic()
        self._listen(channel)

    def _listen(self, channel: FrontChannel) -> None:
        def on_message(message: ToFront) -> None:
            if channel is self._channel:  # Ignore late messages of a replaced engine.
                self._on_message(message)

        channel.start(asyncio.get_running_loop(), on_message)
        channel.send(Hello(self.front_index))

    def reconnect(self, channel: FrontChannel) -> None:
        """Switch to a new engine after the old one failed. It is not ready until it sends `EngineReady`."""
        self.fail("The engine was replaced.")
        old, self._channel = self._channel, channel
        self.ready = self.stats = None
        self._listen(channel)
        old.close()

    @property
    def channel(self) -> FrontChannel:
        """The channel to the current engine."""
        return self._channel

    @property
    def num_open(self) -> int:
        return len(self._sinks)

    async def wait_ready(self, timeout_s: float | None = None) -> EngineReady:
        """Wait until the engine has started. Returns its limits."""

        async def wait() -> EngineReady:
            while self.ready is None:
                if self.failure is not None:
                    raise EngineUnavailable(self.failure)
                self._changed.clear()
                await self._changed.wait()
            return self.ready

        try:
            return await asyncio.wait_for(wait(), timeout_s)
        except TimeoutError:
            raise EngineUnavailable(f"The engine was not ready after {timeout_s:g} s; try again later.") from None

    async def wait_ready_again(self) -> None:
        """After `reconnect`, wait until the new engine has started. Keeps `failure` of the old one until then."""
        while self.ready is None:
            self._changed.clear()
            await self._changed.wait()

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        sink: RequestSink,
        *,
        end_token_ids: tuple[int, ...] = (),
        priority: int = 1,
        deadline: float | None = None,
        cache_salt: str = "",
        caller: Caller = ANONYMOUS,
    ) -> int:
        """Send one request to the engine. `deadline` is on `time.monotonic`. Returns its id, for `abort`."""
        ready = self._ready_or_raise()
        if len(self._sinks) >= self._max_open:
            raise self._overloaded()
        token_ids = _checked_ids(prompt, ready.vocab_size)
        params = self._complete(len(token_ids), params, ready)
        if params.ignore_eos:
            end_token_ids = ()
        request_id = self._next_id
        self._next_id += 1
        if not self._sinks:
            self._last_progress = time.monotonic()  # An idle engine sends nothing, so its silence counts from now.
        self._sinks[request_id] = sink
        self._channel.send(
            NewRequest(
                id=request_id,
                prompt=pack_tokens(token_ids),
                params=params,
                end_token_ids=tuple(dict.fromkeys((*end_token_ids, *params.stop_token_ids))),
                priority=priority,
                deadline=deadline,
                arrival=time.monotonic(),
                received=caller.received,
                names=caller.names,
                tenant=caller.tenant,
                weight=caller.weight,
                cache_salt=cache_salt,
            )
        )
        self.num_unreported += 1
        return request_id

    async def query(self, kind: Literal["explain", "cancel", "steps"], name: str, tenant: str | None) -> bytes:
        """Explain or cancel the request with this name. Returns JSON, or b"" if the engine knows no such request."""
        self._ready_or_raise()
        query_id, self._next_query_id = self._next_query_id, self._next_query_id + 1
        reply = self._queries[query_id] = asyncio.get_running_loop().create_future()
        self._channel.send(Query(self.front_index, query_id, kind, name, tenant))
        try:
            return await asyncio.wait_for(reply, QUERY_TIMEOUT_S)
        except TimeoutError:
            raise EngineUnavailable(
                f"The engine did not answer within {QUERY_TIMEOUT_S:g} s; try again later."
            ) from None
        finally:
            del self._queries[query_id]

    def abort_front(self, front_index: int) -> None:
        """Another front is gone: end all its requests."""
        if self.ready is not None and self.failure is None:
            self._channel.send(AbortFront(front_index))

    def abort(self, request_id: int, reason: FinishReason = "abort") -> None:
        """Abort a request. Its `on_finish` follows with this reason, unless it ended first."""
        if request_id in self._sinks:
            self._channel.send(Abort(ids=(request_id,), reason=reason))

    def is_progressing(self, now: float) -> bool:
        """False if the engine is not ready, or has sent nothing for `STALL_S` although requests are open."""
        if self.ready is None or self.failure is not None:
            return False
        return not self._sinks or now - self._last_progress < STALL_S

    def fail(self, message: str) -> None:
        """The engine is gone: end all open requests with an error."""
        if self.failure is None:
            self._on_message(EngineFailed(message))

    async def close(self) -> None:
        self.fail("The server is shutting down; send the request again to another server.")
        self._channel.close()

    def _ready_or_raise(self) -> EngineReady:
        if self.failure is not None:
            raise EngineUnavailable(self.failure)
        if self.ready is None:
            raise EngineUnavailable("The engine is still loading the model; try again in a few seconds.")
        return self.ready

    def output_limit(self, num_prompt: int, params: SamplingParams) -> int:
        """Maximum number of output tokens. Refuses what `submit` would refuse for its length."""
        return self._complete(num_prompt, params, self._ready_or_raise()).max_tokens or 1

    def _complete(self, num_prompt: int, params: SamplingParams, ready: EngineReady) -> SamplingParams:
        """Check the request against the engine's limits, and fill in `max_tokens` and the seed."""
        if params.logit_bias or params.stop_token_ids:
            _check_named_ids(params, ready.vocab_size)
        room = min(ready.max_context, ready.kv_tokens)
        max_tokens = params.max_tokens if params.max_tokens is not None else max(room - num_prompt, 1)
        if num_prompt + max_tokens > room:
            raise _overflow(num_prompt, max_tokens, params.max_tokens is not None, ready)
        if params.max_tokens is None:
            params = dataclasses.replace(params, max_tokens=max_tokens)
        return params if params.seed is not None else params.with_seed(secrets.randbits(63))

    def _overloaded(self) -> Overloaded:
        """The error for too many open requests. Retry-After is the time until a tenth of them have ended."""
        times = self._finish_times
        rate = (len(times) - 1) / max(times[-1] - times[0], 1e-3) if len(times) > 1 else 1.0
        retry_after_s = min(max(1.0, 0.1 * len(self._sinks) / rate), 60.0)
        return Overloaded(
            f"{len(self._sinks)} requests are open, the maximum of this server; retry in {retry_after_s:.0f} s.",
            retry_after_s=retry_after_s,
        )

    def _on_message(self, message: ToFront) -> None:
        self._last_progress = time.monotonic()
        if isinstance(message, StepTokens):
            self._on_step(message)
            return
        if isinstance(message, EngineLoading):
            if self._on_loading is not None:
                self._on_loading(message)
            return
        if isinstance(message, Reply):
            if message.query_id in self._queries and not self._queries[message.query_id].done():
                self._queries[message.query_id].set_result(message.body)
            return
        if isinstance(message, EngineReady):
            if self.ready is None:
                self.num_engine_starts += 1
            self.ready, self.failure = message, None
        else:
            self._on_failed(message)
        self._changed.set()

    def _on_step(self, step: StepTokens) -> None:
        sinks = self._sinks
        for request_id, prompt_logprobs in step.prompt_logprobs.items():
            if request_id in sinks:
                try:
                    sinks[request_id].on_prompt_logprobs(prompt_logprobs)
                except Exception:
                    self._drop(request_id)
        ids, tokens = unpack_ids(step.ids).tolist(), unpack_tokens(step.tokens).tolist()
        if step.logprobs:
            self._dispatch_with_logprobs(ids, tokens, step.logprobs)
        else:
            for request_id, token_id in zip(ids, tokens, strict=True):
                sink = sinks.get(request_id)
                if sink is not None:
                    try:
                        sink.on_token(token_id, None)
                    except Exception:
                        self._drop(request_id)
        if step.finished:
            now = time.monotonic()
            for finish in step.finished:
                sink = sinks.pop(finish.id, None)
                if sink is not None:
                    self._finish_times.append(now)
                    _finish(sink, finish)
        if step.stats is not None:
            self.stats = step.stats
            self.num_unreported = 0

    def _dispatch_with_logprobs(
        self, ids: list[int], tokens: list[int], logprobs: dict[int, tuple[TokenLogprobs, ...]]
    ) -> None:
        taken: dict[int, int] = {}
        for request_id, token_id in zip(ids, tokens, strict=True):
            sink = self._sinks.get(request_id)
            if sink is None:
                continue
            entries = logprobs.get(request_id, ())
            index = taken.get(request_id, 0)
            taken[request_id] = index + 1
            try:
                sink.on_token(token_id, entries[index] if index < len(entries) else None)
            except Exception:
                self._drop(request_id)

    def _drop(self, request_id: int) -> None:
        """A sink raised: end its request. Other requests of the step are not affected."""
        log.exception("the sink of request %d failed; the request is aborted", request_id)
        sink = self._sinks.pop(request_id)
        self._channel.send(Abort(ids=(request_id,)))
        _finish(sink, Finish(id=request_id, reason="error", message="The server failed to deliver this answer."))

    def _on_failed(self, message: EngineFailed) -> None:
        self.failure = message.message
        for reply in self._queries.values():
            if not reply.done():
                reply.set_exception(EngineUnavailable(message.message))
        open_sinks, self._sinks = self._sinks, {}
        for request_id, sink in open_sinks.items():
            _finish(sink, Finish(id=request_id, reason="error", message=message.message))


def _finish(sink: RequestSink, finish: Finish) -> None:
    try:
        sink.on_finish(finish)
    except Exception:
        log.exception("the sink of request %d failed in on_finish", finish.id)


def _checked_ids(prompt: Sequence[int], vocab_size: int) -> npt.NDArray[np.int64]:
    """The prompt as an array. Raises if it is empty or has ids outside the vocabulary."""
    try:
        token_ids = np.asarray(prompt, np.int64)
    except OverflowError:
        raise _no_token(max(prompt, key=abs), vocab_size) from None
    if not len(token_ids):
        raise BadRequest("The prompt has no tokens; send at least one.", param="prompt")
    # Viewed as unsigned, negative ids exceed any vocabulary too.
    if int(token_ids.view(np.uint64).max()) >= vocab_size:
        lowest, highest = int(token_ids.min()), int(token_ids.max())
        raise _no_token(lowest if lowest < 0 else highest, vocab_size)
    return token_ids


def _no_token(token_id: int, vocab_size: int) -> BadRequest:
    return BadRequest(
        f"The prompt holds token id {token_id}; the vocabulary has ids 0 to {vocab_size - 1}.", param="prompt"
    )


def _check_named_ids(params: SamplingParams, vocab_size: int) -> None:
    for name, token_ids in (
        ("logit_bias", [token_id for token_id, _ in params.logit_bias]),
        ("stop_token_ids", params.stop_token_ids),
    ):
        for token_id in token_ids:
            if token_id >= vocab_size:
                raise BadRequest(
                    f"{name} names token id {token_id}; the vocabulary has ids 0 to {vocab_size - 1}.", param=name
                )


def _overflow(num_prompt: int, max_tokens: int, is_explicit: bool, ready: EngineReady) -> ContextOverflow:
    room, what, remedy = ready.max_context, "the context", "Shorten the prompt or lower max_tokens."
    if ready.kv_tokens < ready.max_context:
        room, what = ready.kv_tokens, "the KV pool"
        remedy = "Shorten the prompt, lower max_tokens, or give the server a larger --kv-gib."
    output = f"max_tokens is {max_tokens}" if is_explicit else "at least 1 token must be generated"
    return ContextOverflow(
        f"The prompt has {num_prompt} tokens and {output}, but {what} holds {room}. {remedy}",
        param="max_tokens" if is_explicit and num_prompt < room else "prompt",
    )
