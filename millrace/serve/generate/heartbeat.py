"""Signs of life of a stream: its HTTP head is sent before the answer begins, and pings follow while nothing else is.

Clients and proxies give up a connection on which nothing arrives. A request may wait for its model, for the queue, for
its prompt to be computed, or for text that a parser holds back: the same timer covers all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec
from aiohttp import web

from millrace.errors import MillraceError
from millrace.serve.http.app_keys import EXTRA_HEADERS, FINISH_REASON, REQUEST_ID, STREAM_STATUS
from millrace.serve.http.event_stream import NO_HEADERS, SERVER_SENT_EVENTS, EventStream, comment
from millrace.serve.http.ids import WARNING_HEADER
from millrace.serve.served_models import loading_state
from millrace.serve.state import STATE

HEAD_AFTER_S = 1.5
"""Errors found sooner are answers with a status of their own; later ones are written into the stream."""
PING_EVERY_S = 5.0
"""Nothing sent since the last look, so long ago, means a ping: no gap is longer than twice this."""
FLUSH_GRACE_S = 30.0
"""How long a client may take to read the rest of a finished stream."""
WAITING = "The answer follows"
"""True in the queue, during prefill, and in the middle of an answer that is held back."""

WriteError = Callable[[MillraceError], bytes]
"""Frames that end a stream with an error, in the shape of a dialect."""


@dataclass(frozen=True, slots=True)
class StreamForm:
    """What the streams of a dialect look like around the answer."""

    write_error: WriteError
    write_ping: Callable[[str], bytes] = comment
    """Takes what the request waits for, for dialects that can say it."""
    media_type: str = SERVER_SENT_EVENTS
    is_usual: bool = False
    """Answers are streamed unless `stream` is false."""
    ping_follows_preamble: bool = False
    """The first event must be the preamble's, as soon as that is known."""


class _Asked(msgspec.Struct):
    model: str | None = None
    stream: bool | None = None


class Heartbeat:
    """Of one request. `stop` must be called at its end."""

    def __init__(self, request: web.Request, data: bytes, form: StreamForm) -> None:
        self._request = request
        self._data = data
        self._form = form
        self.write_error = form.write_error
        self._out: EventStream | None = None
        self._model: str | None = None
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(HEAD_AFTER_S, self._beat)

    @property
    def has_begun(self) -> bool:
        return self._out is not None and self._out.started

    def stream(self, headers: Mapping[str, str] = NO_HEADERS) -> EventStream:
        """The stream of the answer. If it has begun, a warning among the headers is a ping's text instead."""
        if self._out is not None:
            if WARNING_HEADER in headers:
                self._out.send(self._form.write_ping(headers[WARNING_HEADER]))
        else:
            request = self._request
            self._out = EventStream(
                request,
                request_id=request[REQUEST_ID],
                limit_bytes=request.app[STATE].config.server.stream_buffer_kb * 1024,
                media_type=self._form.media_type,
                headers={**request.get(EXTRA_HEADERS, {}), **headers},
            )
        return self._out

    def _beat(self) -> None:
        if self._out is None and not self._is_asked():
            return
        with contextlib.suppress(ConnectionResetError):  # The client has gone; its handler is about to be cancelled.
            out = self.stream()
            out.keep_alive(self._form.write_ping(self._waits_for()), after_preamble=self._form.ping_follows_preamble)
            self._timer = self._loop.call_later(PING_EVERY_S, self._beat)

    def _is_asked(self) -> bool:
        """Whether the body asks for a stream: it may not be translated yet."""
        try:
            asked = msgspec.json.decode(self._data, type=_Asked)
        except msgspec.MsgspecError:
            return False  # The dialect says what is wrong.
        self._model = asked.model
        return self._form.is_usual if asked.stream is None else asked.stream

    def _waits_for(self) -> str:
        """Names the model as the client did."""
        state = self._request.app[STATE]
        name = state.model_name if self._model is None else self._model
        if state.models.knows(name) and (client := state.models.find(name).client).ready is None:
            return f"{loading_state(name, client)}; the answer follows"
        return WAITING

    async def end_with(self, error: MillraceError) -> web.StreamResponse:
        """The status is sent already, so the error is the last frame."""
        reason = error.code or error.type
        self._request.app[STATE].metrics.count_error(reason, error.status)
        self._request[FINISH_REASON], self._request[STREAM_STATUS] = reason, error.status
        out = self.stream()
        if not out.has_ended:
            out.end(self.write_error(error))
        await out.finish(FLUSH_GRACE_S)
        return out.sent_response()

    def stop(self) -> None:
        self._timer.cancel()
        if self._out is not None:
            self._out.close()
