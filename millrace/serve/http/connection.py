"""aiohttp's connection with four changes.

Bytes that are not HTTP get our error body. A request is answered even if garbage follows it in the same segment. A body
that breaks off is noticed at once. A client that disconnects cancels its handler.

This is the only file that uses private names of aiohttp; `tests/serve/test_aiohttp_names.py` checks that they exist.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from aiohttp import StreamReader, web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.web_protocol import RequestHandler, RequestPayloadError, _ErrInfo

from millrace.errors import BadRequest, HeadersTooLarge, MillraceError, RequestFailed
from millrace.serve.http.error_bodies import OtherHttpError, error_response
from millrace.serve.http.ids import request_id_of

log = logging.getLogger("millrace.serve")

Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

_END_OF_HEAD = b"\r\n\r\n"


class PausedWriter(Protocol):
    """Is told when the transport's write buffer has passed its high-water mark."""

    def on_pause(self) -> None: ...


class FrontProtocol(RequestHandler):
    """One connection."""

    __slots__ = ("_last_body_left", "_last_payload", "stream")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._last_payload: StreamReader | None = None
        """Body of the last request whose head was parsed; only this one can be incomplete."""
        self._last_body_left = 0
        """Bytes of that body still to come; 0 if its length was not announced."""
        self.stream: PausedWriter | None = None
        """The streamed answer that writes to the transport itself."""

    # ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def data_received(self, data: bytes) -> None:
        # When aiohttp's parser meets an error, it drops the requests parsed earlier in the same call. So each call gets
        # at most one head, or the rest of one body.
        while True:
            size = self._next_size(data)
            self._feed(data[:size])
            data = data[size:]
            if not data:
                return

    def _next_size(self, data: bytes) -> int:
        if self._last_body_left:
            return min(self._last_body_left, len(data))
        if self._last_payload is not None and not self._last_payload.is_eof():
            return len(data)  # A chunked body: only the parser knows its end.
        end = data.find(_END_OF_HEAD)
        return len(data) if end < 0 else end + len(_END_OF_HEAD)

    def _feed(self, data: bytes) -> None:
        num_before = self._request_count
        super().data_received(data)
        self._last_body_left = max(0, self._last_body_left - len(data))
        if self._request_count == num_before:
            return
        message, payload = self._messages[-1]
        if not isinstance(message, _ErrInfo):
            self._last_payload = payload
            length = message.headers.get("Content-Length", "")
            self._last_body_left = int(length) if length.isdigit() and not payload.is_eof() else 0
        elif self._last_payload is not None and not self._last_payload.is_eof():
            # aiohttp queues the error as if it were the next request; the reader of this one would wait for ever.
            self._last_payload.set_exception(RequestPayloadError(message.message))

    # ── writing ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def pause_writing(self) -> None:
        super().pause_writing()
        if self.stream is not None:
            self.stream.on_pause()

    async def drained(self) -> None:
        """Wait until the write buffer is below its low-water mark. Raises if the connection is lost."""
        await self._drain_helper()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        response = error_response(_protocol_error(status, exc, message), request_id_of(request))
        response.force_close()
        return response


def _protocol_error(status: int, exc: BaseException | None, message: str | None) -> MillraceError:
    if isinstance(exc, LineTooLong):
        return HeadersTooLarge("A header or the request line is too long; send a shorter one.")
    if status < 500:
        # Below the problem the parser quotes the line, with an arrow that means nothing once lines are joined.
        lines = [line.strip() for line in (message or "it could not be parsed").splitlines()]
        what = " ".join(line for line in lines if line not in ("", "^", "b''"))[:200].rstrip(".: ")
        return BadRequest(f"This is not a well-formed HTTP request: {what}.", code="malformed_http")
    log.error("A connection failed.", exc_info=exc)
    return RequestFailed("The server failed on this request; see the server's log.")


class AlreadySent(web.StreamResponse):
    """Returned to aiohttp for an answer that was written to the transport directly: nothing is left to send."""

    def __init__(self, *, keep_alive: bool) -> None:
        super().__init__(status=200)
        self._keep_alive = keep_alive

    async def prepare(self, request: web.BaseRequest) -> None:
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        return None


class _Server(web.Server):
    def __call__(self) -> RequestHandler:
        return FrontProtocol(self, loop=self._loop, **self._kwargs)


def _with_error_bodies(handle: Handle) -> Handle:
    """Some requests (a strange `Expect` on an unknown path) are refused by aiohttp before any middleware runs."""

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await handle(request)
        except web.HTTPException as error:
            if error.status < 400:
                raise
            response = error_response(OtherHttpError(error.status, error.reason), request_id_of(request))
            response.force_close()
            return response

    return answer


class FrontRunner(web.AppRunner):
    """Serves an application over `FrontProtocol`."""

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(
            _with_error_bodies(made.request_handler),
            request_factory=made.request_factory,
            handler_cancellation=True,
            **made._kwargs,
        )
