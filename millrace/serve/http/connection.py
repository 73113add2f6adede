"""aiohttp's connection with three changes: what cannot be parsed gets our error body, a body that breaks off is noticed
at once, and a client that leaves cancels its handler."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import StreamReader, web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.web_protocol import RequestHandler, RequestPayloadError, _ErrInfo

from millrace.errors import BadRequest, HeadersTooLarge, MillraceError, RequestFailed
from millrace.serve.http.error_bodies import OtherHttpError, error_response
from millrace.serve.http.ids import request_id_of

log = logging.getLogger("millrace.serve")

Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class FrontProtocol(RequestHandler):
    """One connection."""

    __slots__ = ("_last_payload",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._last_payload: StreamReader | None = None
        """Of the request whose head came last: the only one that may still be incomplete."""

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._messages:
            message, payload = self._messages[-1]
            if not isinstance(message, _ErrInfo):
                self._last_payload = payload
            elif self._last_payload is not None and not self._last_payload.is_eof():
                # aiohttp queues the error as if it were the next request; this one's reader would wait for ever.
                self._last_payload.set_exception(RequestPayloadError(message.message))

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
        what = " ".join((message or "it could not be parsed").split())[:200]
        return BadRequest(f"This is not a well-formed HTTP request: {what}", code="malformed_http")
    log.error("A connection failed.", exc_info=exc)
    return RequestFailed("The server failed on this request; its log says more.")


class _Server(web.Server):
    def __call__(self) -> RequestHandler:
        return FrontProtocol(self, loop=self._loop, **self._kwargs)


def _answering_in_our_words(handle: Handle) -> Handle:
    """aiohttp refuses some requests (an odd `Expect` on a path that is not there) before any middleware is asked."""

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
            _answering_in_our_words(made.request_handler),
            request_factory=made.request_factory,
            handler_cancellation=True,
            **made._kwargs,
        )
