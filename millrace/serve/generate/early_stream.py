"""Streams whose model is still being loaded: their HTTP head is sent early, and comments tell how far loading is.

Clients of server-sent events skip comments, and neither they nor proxies in between time out on a silent connection.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from aiohttp import web

from millrace.errors import EngineUnavailable, MillraceError
from millrace.link.client import EngineClient
from millrace.serve.http.app_keys import EXTRA_HEADERS, REQUEST_ID
from millrace.serve.http.event_stream import EventStream
from millrace.serve.served_models import loading_state
from millrace.serve.state import STATE, FrontState

COMMENT_EVERY_S = 3.0
"""The first comes after as long: a model that wakes sooner can still be answered with any status."""
FLUSH_GRACE_S = 30.0

WriteError = Callable[[MillraceError], bytes]
"""Frames that end a stream with an error, in the shape of a dialect."""


class _Asked(msgspec.Struct):
    model: str | None = None
    stream: bool = False


@dataclass(frozen=True, slots=True)
class EarlyStream:
    out: EventStream
    write_error: WriteError

    async def end_with(self, request: web.Request, error: MillraceError) -> web.StreamResponse:
        """The status is sent already, so the error is the last frame."""
        request.app[STATE].metrics.count_error(error.code or error.type, error.status)
        self.out.end(self.write_error(error))
        await self.out.finish(FLUSH_GRACE_S)
        return self.out.sent_response()


async def begin_while_loading(request: web.Request, data: bytes, write_error: WriteError) -> EarlyStream | None:
    """Wait while the model of a streaming request is being loaded. None if nothing has been sent meanwhile."""
    state = request.app[STATE]
    found = _model_to_wait_for(state, data)
    if found is None:
        return None
    name, client, early = *found, None
    deadline = time.monotonic() + state.loading_wait_s
    client.want()
    while client.ready is None and client.failure is None and not state.draining:
        left_s = deadline - time.monotonic()
        with contextlib.suppress(EngineUnavailable):
            await client.wait_ready(max(0.0, min(COMMENT_EVERY_S, left_s)))
        if client.ready is not None:
            break
        if client.failure is not None:  # Going on would ask for the engine again.
            return await _given_up(request, early, EngineUnavailable(client.failure))
        text = loading_state(name, client)
        early = early or EarlyStream(_stream(request, state), write_error)
        if left_s <= COMMENT_EVERY_S:  # Not the clock: timers of the loop fire up to a millisecond early.
            return await _given_up(request, early, EngineUnavailable(f"{text}; try again in a few seconds."))
        early.out.send_comment(f"{text}; the answer follows.")
    return early


async def _given_up(request: web.Request, early: EarlyStream | None, error: MillraceError) -> EarlyStream:
    if early is None or not early.out.started:
        raise error
    await early.end_with(request, error)
    return early


def _model_to_wait_for(state: FrontState, data: bytes) -> tuple[str, EngineClient] | None:
    """The model that is asked for, by the name that the client used; None if it is loaded."""
    if all(model.client.ready is not None for model in state.models):
        return None
    try:
        asked = msgspec.json.decode(data, type=_Asked)
    except msgspec.MsgspecError:
        return None  # The dialect says what is wrong.
    name = state.model_name if asked.model is None else asked.model
    if not asked.stream or not state.models.knows(name):
        return None
    client = state.models.find(name).client
    return (name, client) if client.ready is None else None


def _stream(request: web.Request, state: FrontState) -> EventStream:
    return EventStream(
        request,
        request_id=request[REQUEST_ID],
        limit_bytes=state.config.server.stream_buffer_kb * 1024,
        headers=request.get(EXTRA_HEADERS, {}),
    )
