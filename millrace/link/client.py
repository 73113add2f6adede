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
import time
from collections.abc import Callable, Sequence

import msgspec

from millrace.errors import EngineUnavailable, Overloaded
from millrace.link.block_parts import PartAnswer, PartOfPrefix
from millrace.link.caller import ANONYMOUS, Caller
from millrace.link.channel import FrontChannel, NoEngine
from millrace.link.engine_stats import EngineStats
from millrace.link.front.adapters import Adapters
from millrace.link.front.delivery import Delivery
from millrace.link.front.documents import UNREAD, check_documents, params_alone, texts_alone
from millrace.link.front.kv_listeners import KvListeners
from millrace.link.front.limits import checked_ends, checked_ids, completed
from millrace.link.front.open_requests import TOKEN_BYTES, OpenRequests, RequestSink
from millrace.link.front.questions import Questions
from millrace.link.messages import (
    FRONT_SHIFT,
    Abort,
    AbortFront,
    AdapterNames,
    EndSearch,
    EngineFailed,
    EngineLoading,
    EngineReady,
    EngineRetired,
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
    WatchKv,
    pack_tokens,
)
from millrace.observe.sketch import Sketch
from millrace.params.classes import FinishReason
from millrace.params.keeping import Documents, Retain
from millrace.params.sampling import SamplingParams

log = logging.getLogger(__name__)

STALL_S = 30.0
"""An engine with open requests that sends nothing for this long is not ready."""
INCARNATION_SHIFT = 32
"""Position of the front's restart count in request ids."""


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
        self.requests = OpenRequests(resume_s)
        self._questions = Questions(self._send_to_running)
        self.adapters = Adapters(self._questions, front_index, self._send)
        self._delivery = Delivery(self.requests, self._send)
        self._searches: set[int] = set()
        self.kv = KvListeners(lambda is_on: self._channel.send(WatchKv(front_index, is_on)))
        self._changed = asyncio.Event()
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
        self.adapters.check(params.adapter)
        if search is None:
            self.check_room()
        token_ids = checked_ids(prompt, ready.vocab_size)
        params = completed(params, len(token_ids), ready)
        end_token_ids = checked_ends(params, end_token_ids)
        if documents is not None and documents.spans:
            check_documents(documents, params, ready, has_handle=retain is not None)
            unnamed = dataclasses.replace(caller, names=())  # What a client asks about its request is not about these.
            for text in texts_alone(documents, token_ids.tolist(), ready.block_size):
                alone = params_alone(params.adapter)
                self.submit(text, alone, UNREAD, priority=priority, cache_salt=cache_salt, caller=unnamed)
        if not self.requests.by_id:
            self._last_progress = time.monotonic()  # An idle engine sends nothing, so its silence counts from now.
        now = time.monotonic()
        resumed = Resumption(pack_tokens(checked_ids(output, ready.vocab_size)), now, now, 0) if output else None
        message = NewRequest(
            id=self._new_id(),
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
        return message.id

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

    async def query(self, kind: QueryKind, name: str, tenant: str | None, value: str = "") -> bytes:
        """Explain or cancel the request with this name. Returns JSON, or b"" if the engine knows no such request."""
        return await self._questions.ask(lambda query_id: Query(self.front_index, query_id, kind, name, tenant, value))

    async def move_part(self, part: PartOfPrefix) -> PartAnswer:
        """Read or write blocks of a prefix. Its `front` and `query_id` are filled in."""
        reply = await self._questions.ask(
            lambda query_id: msgspec.structs.replace(part, front=self.front_index, query_id=query_id)
        )
        return msgspec.msgpack.decode(reply, type=PartAnswer)

    async def retire(self, idle_s: float = math.inf) -> Idleness:
        """Stop the engine if it has been idle for `idle_s` seconds. Returns how much it is used."""
        reply = await self._questions.ask(lambda query_id: Retire(self.front_index, query_id, idle_s))
        return msgspec.json.decode(reply, type=Idleness)

    def _send(self, message: ToEngine) -> None:
        self._channel.send(message)

    def _send_to_running(self, message: ToEngine) -> None:
        if self.failure is not None or self.ready is None:
            raise EngineUnavailable(self.failure or "The engine is not loaded.")
        self._channel.send(message)

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
        return completed(params, num_prompt, self._limits_or_raise()).max_tokens or 1

    def check_room(self) -> None:
        """Raise `Overloaded` if too many requests are open. Retry-After: the time until a tenth of them have ended."""
        if self.num_open < self._max_open:
            return
        retry_after_s = min(max(1.0, 0.1 * self.num_open / self._delivery.ends_per_s), 60.0)
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
            if not self._questions.answer(message):
                self.adapters.known.on_reply(message.query_id, message.body)
            return
        if isinstance(message, KvEvents):
            self.kv.on_events(message)
            return
        if isinstance(message, AdapterNames):
            self.adapters.known.on_names(message.names)
            return
        if isinstance(message, EngineReady):
            if self.ready is None:
                self.num_engine_starts += 1
                self.kv.on_new_engine()
            self.ready, self.failure, self.limits = message, None, message
            self._recheck(message)
            self.adapters.tell(message.adapters)
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
        self._delivery.deliver(step)
        if step.stats is not None:
            self.stats = step.stats
            self.latencies.merge(Sketch(step.stats.latencies))
            self.num_unreported = 0

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
        self._questions.fail(message.message)
