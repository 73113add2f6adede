"""A front's client of the engine: submits requests and calls back for each token and for the end.

Lives on one asyncio loop, where the callbacks run. Requests beyond the limits in `EngineReady` are rejected here and
cost the engine nothing. A model may be unloaded: its client then has no engine, asks for one when a request needs it
(`on_wanted`), and keeps requests that the last engine did not take for the next. Requests of an engine that died are
resumed by the next one (`open_requests`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from millrace.errors import EngineUnavailable, ModelNotFound, Overloaded
from millrace.link.adapter_messages import AdapterAnswer, AdapterFigures, AddAdapter, AddCanary
from millrace.link.block_parts import PartAnswer, PartOfPrefix
from millrace.link.channel import FrontChannel, NoEngine
from millrace.link.documents import UNREAD, check_documents, texts_alone
from millrace.link.known_adapters import KnownAdapters
from millrace.link.kv_listeners import KvListeners
from millrace.link.limits import check_allowed_ends, check_named_ids, checked_ids, overflow, text_too_long
from millrace.link.messages import (
    FRONT_SHIFT,
    Abort,
    AbortFront,
    AdapterNames,
    AdapterQuery,
    EndSearch,
    EngineFailed,
    EngineLoading,
    EngineReady,
    EngineRetired,
    EngineStats,
    Finish,
    Hello,
    Idleness,
    KvEvents,
    NewRequest,
    Query,
    QueryKind,
    Reply,
    Resumption,
    Retire,
    StepTokens,
    ToEngine,
    ToFront,
    TokenLogprobs,
    WatchKv,
    pack_tokens,
    unpack_ids,
    unpack_tokens,
)
from millrace.link.open_requests import TOKEN_BYTES, OpenRequests, RequestSink
from millrace.observe.sketch import Sketch
from millrace.params import Documents, FinishReason, Retain, SamplingParams

log = logging.getLogger(__name__)

STALL_S = 30.0
"""An engine with open requests that sends nothing for this long is not ready."""
QUERY_TIMEOUT_S = 10.0
ADAPTER_TIMEOUT_S = 120.0
"""For reading an adapter's files."""
NO_ADAPTERS = "The model takes no adapters: start its server with --adapters, --adapter-dir or --allow-adapters."
MAX_NAMES_SHOWN = 20
"""Of adapters, in messages."""
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


class EngineClient:
    def __init__(
        self,
        channel: FrontChannel | None,
        *,
        front_index: int = 0,
        incarnation: int = 0,
        max_open: int = 1 << 30,
        resume_s: float = 0.0,
        on_loading: Callable[[EngineLoading], None] | None = None,
    ) -> None:
        """`resume_s`: how long requests of an engine that died wait for the next one; 0: they end with it."""
        self.ready: EngineReady | None = None
        self.stats: EngineStats | None = None
        self.latencies = Sketch()
        """What engines measured since it was last taken."""
        self.failure: str | None = None
        self.lacks_memory = False
        """True if the failure is that the model does not fit in the free memory."""
        self.loading: EngineLoading | None = None
        """The last progress of an engine that is starting."""
        self.limits: EngineReady | None = None
        """`ready`, or while the model is unloaded that of its last engine."""
        self.known_adapters = KnownAdapters()
        self.is_unloaded = channel is None
        """True if there is no engine and none is starting."""
        self.is_wanted = False
        """True from `want` until an engine starts or cannot."""
        self.on_wanted: Callable[[], None] = lambda: None
        """Called when an unloaded model is needed."""
        self.on_lacks_memory: Callable[[str], bool] = lambda message: False
        """Called if the model does not fit in the free memory. True: the supervisor makes room or gives up."""
        self.num_unreported = 0
        """Requests submitted since the last `EngineStats`, which therefore does not count them."""
        self.front_index = front_index
        self.num_engine_starts = 0
        self._channel: FrontChannel = NoEngine() if channel is None else channel
        self._max_open = max_open
        self._on_loading = on_loading
        # A restarted front must not reuse ids that the engine may still know.
        self._next_id = (front_index << FRONT_SHIFT) + (incarnation << INCARNATION_SHIFT)
        self._queries: dict[int, asyncio.Future[bytes]] = {}
        self._next_query_id = 0
        self.requests = OpenRequests(resume_s)
        self._searches: set[int] = set()
        self.kv = KvListeners(lambda is_on: self._channel.send(WatchKv(front_index, is_on)))
        self._changed = asyncio.Event()
        self._finish_times: deque[float] = deque(maxlen=256)
        self._last_progress = time.monotonic()
        self._listen(self._channel)

    def _listen(self, channel: FrontChannel) -> None:
        def on_message(message: ToFront) -> None:
            if channel is self._channel:  # Ignore late messages of a replaced engine.
                self._on_message(message)

        channel.start(asyncio.get_running_loop(), on_message)
        channel.send(Hello(self.front_index))

    def reconnect(self, channel: FrontChannel) -> None:
        """Switch to a new engine after the old one failed or retired. It is not ready until it sends `EngineReady`."""
        if self.is_unloaded:
            self.failure = None  # Of an engine that was given up.
        else:
            self.fail("The engine was replaced.")
        self.is_unloaded = self.is_wanted = self.lacks_memory = False
        old, self._channel = self._channel, channel
        self.ready = self.stats = self.loading = None
        self._last_progress = time.monotonic()
        self._listen(channel)
        old.close()
        for message in self.requests.for_next_engine():
            channel.send(message)

    def unload(self) -> None:
        """The engine has stopped in order, or is about to: there is none until the next `reconnect`."""
        if not self.is_unloaded:
            self.is_unloaded, self.failure = True, None
            self._leave()

    def give_up(self, message: str) -> None:
        """The engine could not start. Open requests end with this error; the next request asks for an engine again."""
        self._note_failure(EngineFailed(message))
        self.requests.end_all(message)
        self.is_unloaded, self.is_wanted = True, False
        self._leave()

    def _leave(self) -> None:
        old, self._channel = self._channel, NoEngine()
        self.ready = self.stats = self.loading = None
        old.close()
        self._changed.set()

    def want(self) -> None:
        """Ask for an engine if the model is unloaded, once until the answer."""
        if self.is_unloaded and not self.is_wanted:
            self.is_wanted, self.failure = True, None
            self.on_wanted()

    @property
    def channel(self) -> FrontChannel:
        """The channel to the current engine."""
        return self._channel

    @property
    def num_open(self) -> int:
        """Requests without an answer; a search is one of them."""
        return len(self.requests.by_id) - self.requests.num_steps + len(self._searches)

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

    async def wait_unloaded(self, timeout_s: float) -> None:
        """Wait until everything that a retired engine sent has been handled, or until it is known to have died."""

        async def wait() -> None:
            while not self.is_unloaded and self.failure is None:
                self._changed.clear()
                await self._changed.wait()

        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(wait(), timeout_s)

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
        retain: Retain | None = None,
        documents: Documents | None = None,
        caller: Caller = ANONYMOUS,
        search: int | None = None,
        output: Sequence[int] = (),
    ) -> int:
        """Send one request to the engine. `deadline` is on `time.monotonic`. `documents`: each is computed alone too,
        so that it is cached. `search`: id of the beam search that it is a step of. `output`: tokens that another server
        generated, after which this one goes on. Returns its id, for `abort`."""
        # A search whose engine died goes on with the next one, as its open steps do.
        ready = self._limits_or_raise(may_wait=search is not None and self.requests.is_waiting)
        self._check_adapter(params.adapter)
        if search is None:
            self.check_room()
        token_ids = checked_ids(prompt, ready.vocab_size)
        params = self._complete(len(token_ids), params, ready)
        if params.ignore_eos and params.grammar is None:
            end_token_ids = ()
        end_token_ids = tuple(dict.fromkeys((*end_token_ids, *params.stop_token_ids)))
        check_allowed_ends(params, end_token_ids)
        if documents is not None and documents.spans:
            check_documents(documents, params, ready, has_handle=retain is not None)
            unnamed = dataclasses.replace(caller, names=())  # What a client asks about its request is not about these.
            for text in texts_alone(documents, token_ids.tolist(), ready.block_size):
                alone = SamplingParams(temperature=0.0, max_tokens=0, pooling="last", adapter=params.adapter)
                self.submit(text, alone, UNREAD, priority=priority, cache_salt=cache_salt, caller=unnamed)
        request_id = self._new_id()
        if not self.requests.by_id:
            self._last_progress = time.monotonic()  # An idle engine sends nothing, so its silence counts from now.
        now = time.monotonic()
        resumed = Resumption(pack_tokens(checked_ids(output, ready.vocab_size)), now, now, 0) if output else None
        message = NewRequest(
            id=request_id,
            prompt=pack_tokens(token_ids),
            params=params,
            end_token_ids=end_token_ids,
            priority=priority,
            deadline=deadline,
            arrival=now,
            received=caller.received,
            names=caller.names,
            tenant=caller.tenant,
            weight=caller.weight,
            cache_salt=cache_salt,
            retain=retain,
            documents=documents,
            search=search,
            resumed=resumed,
        )
        self.requests.add(message, sink)
        self._channel.send(message)
        self.num_unreported += 1
        self.want()
        return request_id

    @property
    def adapters(self) -> tuple[str, ...] | None:
        """Names of the adapters that requests may ask for; None if the model takes none or was never loaded."""
        return self.known_adapters.names

    def _check_adapter(self, name: str) -> None:
        if not name or name in (self.adapters or ()):
            return
        known = ", ".join(map(repr, (self.adapters or ())[:MAX_NAMES_SHOWN]))
        if self.adapters is None:
            known = "none: start it with --adapters NAME=PATH"
        raise ModelNotFound(f"There is no adapter {name[:200]!r}; this model has {known or 'none'}.", param="adapter")

    def begin_search(self) -> int:
        """Id of a new beam search, until `end_search`."""
        search = self._new_id()
        self._searches.add(search)
        return search

    def end_search(self, finish: Finish) -> None:
        if finish.id in self._searches:
            self._searches.discard(finish.id)
            self._channel.send(EndSearch(finish))

    def _new_id(self) -> int:
        request_id, self._next_id = self._next_id, self._next_id + 1
        return request_id

    async def add_adapter(self, asked: AddAdapter) -> AdapterAnswer:
        """Answered when its files were read. Engines that are started later are told of it, too."""
        answer = await self._change_adapters("add_adapter", msgspec.json.encode(asked).decode())
        if not answer.error:
            self.known_adapters.note_added(asked)
        return answer

    async def drop_adapter(self, name: str) -> AdapterAnswer:
        return await self._change_adapters("drop_adapter", name)

    async def add_canary(self, asked: AddCanary) -> AdapterAnswer:
        """Answered when its files were read."""
        return await self._change_adapters("add_canary", msgspec.json.encode(asked).decode())

    async def end_canary(self, name: str, *, promotes: bool) -> AdapterAnswer:
        """Engines that are started later are told of a promoted version."""
        answer = await self._change_adapters("promote_canary" if promotes else "abort_canary", name)
        if promotes and not answer.error:
            self.known_adapters.note_added(AddAdapter(name, answer.adapters[0].path))
        return answer

    async def _change_adapters(self, kind: AdapterQuery, name: str) -> AdapterAnswer:
        reply = await self._ask(lambda query_id: Query(self.front_index, query_id, kind, name), ADAPTER_TIMEOUT_S)
        return msgspec.json.decode(reply, type=AdapterAnswer) if reply else AdapterAnswer(error=NO_ADAPTERS)

    async def adapter_figures(self) -> list[AdapterFigures]:
        reply = await self.query("adapters", "", None)
        return msgspec.json.decode(reply, type=AdapterAnswer).adapters if reply else []

    def _tell_of_adapters(self, names: tuple[str, ...] | None) -> None:
        """Requests that go on with this engine find them: it takes messages in order."""
        for asked in self.known_adapters.on_new_engine(names):
            query_id, self._next_query_id = self._next_query_id, self._next_query_id + 1
            body = msgspec.json.encode(msgspec.structs.replace(asked, is_told=True)).decode()
            self._channel.send(Query(self.front_index, query_id, "add_adapter", body))
            self.known_adapters.note_told(query_id, asked.name)

    async def query(self, kind: QueryKind, name: str, tenant: str | None, value: str = "") -> bytes:
        """Explain or cancel the request with this name. Returns JSON, or b"" if the engine knows no such request."""
        return await self._ask(lambda query_id: Query(self.front_index, query_id, kind, name, tenant, value))

    async def move_part(self, part: PartOfPrefix) -> PartAnswer:
        """Read or write blocks of a prefix. Its `front` and `query_id` are filled in."""
        reply = await self._ask(
            lambda query_id: msgspec.structs.replace(part, front=self.front_index, query_id=query_id)
        )
        return msgspec.msgpack.decode(reply, type=PartAnswer)

    async def retire(self, idle_s: float = math.inf) -> Idleness:
        """Stop the engine if it has been idle for `idle_s` seconds. Returns how much it is used."""
        reply = await self._ask(lambda query_id: Retire(self.front_index, query_id, idle_s))
        return msgspec.json.decode(reply, type=Idleness)

    async def _ask(self, make_message: Callable[[int], ToEngine], timeout_s: float = QUERY_TIMEOUT_S) -> bytes:
        if self.failure is not None or self.ready is None:
            raise EngineUnavailable(self.failure or "The engine is not loaded.")
        query_id, self._next_query_id = self._next_query_id, self._next_query_id + 1
        reply = self._queries[query_id] = asyncio.get_running_loop().create_future()
        self._channel.send(make_message(query_id))
        try:
            return await asyncio.wait_for(reply, timeout_s)
        except TimeoutError:
            raise EngineUnavailable(f"The engine did not answer within {timeout_s:g} s; try again later.") from None
        finally:
            del self._queries[query_id]

    def abort_front(self, front_index: int) -> None:
        """Another front is gone: end all its requests."""
        if self.ready is not None and self.failure is None:
            self._channel.send(AbortFront(front_index))

    def abort(self, request_id: int, reason: FinishReason = "abort") -> None:
        """Abort a request. Its `on_finish` follows with this reason, unless it ended first."""
        one = self.requests.by_id.get(request_id)
        if one is None:
            return
        one.aborted = reason
        self._channel.send(Abort(ids=(request_id,), reason=reason))
        if self.is_unloaded or one.lost_at is not None:  # No engine has it, or none answers yet.
            # Not at once: the caller may be ending other requests of the same job.
            asyncio.get_running_loop().call_soon(self.requests.end, one.finish(reason))

    def cancel_waiting(self, name: str, tenant: str | None) -> int:
        """Cancel the sequences with this name, of this tenant (None: of any), that wait for an engine. Returns how many
        there were."""
        waiting = [one for one in self.requests.waiting() if tenant in (None, one.tenant) and name in one.names]
        for message in waiting:
            self.abort(message.id, "cancelled")
        return len(waiting)

    def silent_s(self, now: float) -> float:
        """Seconds since the engine's last message; `now` is on `time.monotonic`."""
        return now - self._last_progress

    def is_progressing(self, now: float) -> bool:
        """False if the engine is not ready, or has sent nothing for `STALL_S` although requests are open."""
        if self.ready is None or self.failure is not None:
            return False
        return not self.requests.by_id or self.silent_s(now) < STALL_S

    def fail(self, message: str) -> None:
        """The engine is gone. Open requests wait for the next one, or end with this error if they may not wait."""
        if self.failure is None:
            self._on_message(EngineFailed(message))

    async def close(self) -> None:
        message = "The server is shutting down; send the request again to another server."
        self._note_failure(EngineFailed(message))
        self.requests.end_all(message)
        self._channel.close()

    def _limits_or_raise(self, *, may_wait: bool = False) -> EngineReady:
        if self.failure is not None and not may_wait:
            raise EngineUnavailable(self.failure)
        limits = self.ready or self.limits
        if limits is None:
            raise EngineUnavailable("The engine is still loading the model; try again in a few seconds.")
        return limits

    def output_limit(self, num_prompt: int, params: SamplingParams) -> int:
        """Maximum number of output tokens. Refuses what `submit` would refuse for its length."""
        return self._complete(num_prompt, params, self._limits_or_raise()).max_tokens or 1

    def _complete(self, num_prompt: int, params: SamplingParams, ready: EngineReady) -> SamplingParams:
        """Check the request against the engine's limits, and fill in `max_tokens` and the seed."""
        if params.logit_bias or params.stop_token_ids or params.allowed_token_ids:
            check_named_ids(params, ready.vocab_size)
        room = min(ready.max_context, ready.kv_tokens)
        max_tokens = params.max_tokens if params.max_tokens is not None else max(room - num_prompt, 1)
        if params.pooling == "model":
            if num_prompt > ready.max_context:
                raise text_too_long(num_prompt, ready)
        elif num_prompt + max_tokens > room:
            raise overflow(num_prompt, max_tokens, ready)
        if params.max_tokens is None:
            params = msgspec.structs.replace(params, max_tokens=max_tokens)
        return params if params.seed is not None else params.with_seed(secrets.randbits(63))

    def check_room(self) -> None:
        """Raise `Overloaded` if too many requests are open. Retry-After: the time until a tenth of them have ended."""
        if self.num_open < self._max_open:
            return
        times = self._finish_times
        rate = (len(times) - 1) / max(times[-1] - times[0], 1e-3) if len(times) > 1 else 1.0
        retry_after_s = min(max(1.0, 0.1 * self.num_open / rate), 60.0)
        raise Overloaded(
            f"{self.num_open} requests are open, the maximum of this server; retry in {retry_after_s:.0f} s.",
            retry_after_s=retry_after_s,
        )

    def _on_message(self, message: ToFront) -> None:
        self._last_progress = time.monotonic()
        if isinstance(message, StepTokens):
            self._on_step(message)
            return
        if isinstance(message, EngineLoading):
            self.loading = message
            self.requests.note_loading()
            if self._on_loading is not None:
                self._on_loading(message)
            return
        if isinstance(message, Reply):
            if message.query_id in self._queries and not self._queries[message.query_id].done():
                self._queries[message.query_id].set_result(message.body)
            else:
                self.known_adapters.on_reply(message.query_id, message.body)
            return
        if isinstance(message, KvEvents):
            self.kv.on_events(message)
            return
        if isinstance(message, AdapterNames):
            self.known_adapters.on_names(message.names)
            return
        if isinstance(message, EngineReady):
            if self.ready is None:
                self.num_engine_starts += 1
                self.kv.on_new_engine()
            self.ready, self.failure, self.limits = message, None, message
            self._recheck(message)
            self._tell_of_adapters(message.adapters)
            self.requests.resume()
        elif isinstance(message, EngineRetired):
            self.unload()
            if self.requests.by_id:
                self.want()
        elif message.lacks_memory and self.on_lacks_memory(message.message):
            self.unload()
        else:
            self._on_failed(message)
        self._changed.set()

    def _on_step(self, step: StepTokens) -> None:
        receivers = self.requests.receivers
        for request_id, prompt_logprobs in step.prompt_logprobs.items():
            if request_id in receivers:
                try:
                    receivers[request_id][0].on_prompt_logprobs(prompt_logprobs)
                except Exception:
                    self._drop(request_id)
        ids, tokens = unpack_ids(step.ids).tolist(), unpack_tokens(step.tokens).tolist()
        if step.logprobs:
            self._dispatch_with_logprobs(ids, tokens, step.logprobs)
        else:
            for request_id, token_id in zip(ids, tokens, strict=True):
                receiver = receivers.get(request_id)
                if receiver is not None:
                    sink, keep = receiver
                    keep(token_id)
                    try:
                        sink.on_token(token_id, None)
                    except Exception:
                        self._drop(request_id)
        if step.finished:
            now = time.monotonic()
            for finish in step.finished:
                self._finish_times.append(now)
                self.requests.end(finish)
        if step.stats is not None:
            self.stats = step.stats
            self.latencies.merge(Sketch(step.stats.latencies))
            self.num_unreported = 0

    def _dispatch_with_logprobs(
        self, ids: list[int], tokens: list[int], logprobs: dict[int, tuple[TokenLogprobs, ...]]
    ) -> None:
        taken: dict[int, int] = {}
        for request_id, token_id in zip(ids, tokens, strict=True):
            receiver = self.requests.receivers.get(request_id)
            if receiver is None:
                continue
            sink, keep = receiver
            keep(token_id)
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
        self._channel.send(Abort(ids=(request_id,)))
        message = "The server failed to deliver this answer."
        self.requests.end(Finish(id=request_id, reason="error", message=message))

    def _recheck(self, ready: EngineReady) -> None:
        """Requests kept from the last engine may be too long for this one, which may have less memory."""
        room = min(ready.max_context, ready.kv_tokens)
        for request_id, one in list(self.requests.by_id.items()):
            num_prompt, max_tokens = len(one.message.prompt) // TOKEN_BYTES, one.message.params.max_tokens or 0
            if num_prompt + max_tokens > room:
                self._channel.send(Abort(ids=(request_id,)))
                what = f"The prompt has {num_prompt} tokens and its answer up to {max_tokens}"
                why = f"{what}, but the model was loaded again with room for {room}. Send the request again."
                self.requests.end(one.finish("error", why))

    def _on_failed(self, message: EngineFailed) -> None:
        is_first = self.failure is None  # Its own message and the supervisor's may both come.
        self._note_failure(message)
        if is_first:
            self.requests.lose(message.message, was_ready=self.ready is not None)

    def _note_failure(self, message: EngineFailed) -> None:
        self.failure, self.lacks_memory = message.message, message.lacks_memory
        for reply in self._queries.values():
            if not reply.done():
                reply.set_exception(EngineUnavailable(message.message))
