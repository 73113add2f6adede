"""One streamed answer: frames written directly to the connection's transport.

While the client keeps up, a frame costs one write and no task switch. When the write buffer passes its high-water mark,
text is held back as text, and many tokens become one frame once the buffer has drained. A client that leaves more than
`limit_bytes` unread is disconnected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from email.utils import formatdate
from types import MappingProxyType
from typing import Protocol

from aiohttp import HttpVersion11, web

from millrace.serve.http.connection import AlreadySent, FrontProtocol

NO_HEADERS: Mapping[str, str] = MappingProxyType({})
LAST_CHUNK = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"
SERVER_SENT_EVENTS = "text/event-stream; charset=utf-8"
JSON_LINES = "application/x-ndjson"


class TextHolder(Protocol):
    """Holds text back while its stream is paused."""

    def take_held(self) -> bytes:
        """Stop holding the text and return it as one frame; empty if there is none."""


class EventStream:
    """The HTTP head is sent with the first frame; until then an error can still be a plain response."""

    __slots__ = (
        "_chunked",
        "_ended",
        "_head",
        "_holders",
        "_is_silent",
        "_keep_alive",
        "_limit_bytes",
        "_num_held",
        "_on_slow",
        "_preamble",
        "_protocol",
        "_resumer",
        "_tail",
        "_transport",
        "closed",
        "direct",
        "has_comments",
        "paused",
        "write",
    )

    def __init__(
        self,
        request: web.Request,
        *,
        request_id: str,
        limit_bytes: int,
        media_type: str = SERVER_SENT_EVENTS,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> None:
        transport = request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("The client has gone.")
        protocol = request.protocol
        assert isinstance(protocol, FrontProtocol)
        self._protocol = protocol
        self._transport = transport
        self._chunked = request.version == HttpVersion11
        self._keep_alive = request.keep_alive and self._chunked
        self._head = _head(request_id, media_type, headers, chunked=self._chunked, keep_alive=self._keep_alive)
        self.has_comments = media_type == SERVER_SENT_EVENTS
        self._preamble = b""
        self._limit_bytes = limit_bytes
        self._on_slow: Callable[[int], None] = _ignore
        self._holders: list[TextHolder] = []
        self._tail: list[bytes] = []
        self._num_held = 0
        self._resumer: asyncio.Task[None] | None = None
        self._ended = False
        self._is_silent = True
        """True if no frame was sent since the last `keep_alive`."""
        self.write = transport.write
        self.closed = False
        self.paused = False
        self.direct = False
        """True while frames may be passed straight to `write`, each as one HTTP chunk."""
        transport.set_write_buffer_limits(high=limit_bytes // 4)
        protocol.stream = self

    @property
    def started(self) -> bool:
        return not self._head

    @property
    def is_gone(self) -> bool:
        """Whether the connection is closed or closing."""
        return self.closed or self._transport.is_closing()

    def begin_with(self, frames: bytes, holders: list[TextHolder], on_slow: Callable[[int], None]) -> None:
        """`frames` precede the first frame sent. `holders` are asked for held text after a pause. `on_slow` is called
        with the number of unread bytes when a slow client is disconnected."""
        self._preamble = frames
        self.direct = False  # Until the preamble has been sent.
        self._holders = holders
        self._on_slow = on_slow

    def send(self, frames: bytes) -> None:
        """Send whole frames, in order with everything else."""
        if self.closed:
            return
        if self.paused:
            self._tail.append(frames)
            self.hold(len(frames))
            return
        self._emit(frames)

    def send_last(self, frames: bytes) -> None:
        """Send the last frames of one choice."""
        self.send(frames)

    def send_comment(self, text: str) -> None:
        """Between two frames of a stream of server-sent events: clients skip it. Other streams have no comments."""
        if self.has_comments:
            self.send(b": %b\n\n" % " ".join(text.split()).encode())
            self.direct = False

    def keep_alive(self, ping: bytes, *, after_preamble: bool) -> None:
        """Send `ping` if nothing was sent since the last call."""
        if self._is_silent and not (self.is_gone or self.paused or self._ended):
            preamble, self._preamble = self._preamble, b""
            self._emit(preamble + ping if after_preamble else ping)
            if not after_preamble:
                self._preamble = preamble
        self._is_silent = True
        self.direct = False  # The next frame goes through `_emit`, which notes it.

    @property
    def has_ended(self) -> bool:
        return self._ended

    def end(self, frames: bytes) -> None:
        """Send the last frames and finish the HTTP body."""
        self._ended = True
        self.send(frames)
        self.direct = False

    def hold(self, num_bytes: int) -> None:
        """Count bytes that are held back in this process; too many end the connection."""
        self._num_held += num_bytes
        if self._num_held + self._transport.get_write_buffer_size() > self._limit_bytes:
            self._drop()

    def _drop(self) -> None:
        unread = self._num_held + self._transport.get_write_buffer_size()
        self.close()
        self._transport.abort()
        self._on_slow(unread)

    def on_pause(self) -> None:
        """The write buffer is above its high-water mark: hold frames until it has drained."""
        self.direct = False
        if not self.paused and not self.closed:
            self.paused = True
            if self._resumer is None:
                self._resumer = asyncio.get_running_loop().create_task(self._resume())

    def close(self) -> None:
        """Write nothing more. The connection itself stays open."""
        self.closed = True
        self.direct = False
        self._detach()

    def _detach(self) -> None:
        if self._protocol.stream is self:
            self._protocol.stream = None

    async def finish(self, grace_s: float) -> None:
        """Wait until everything is sent; disconnect a client that has not read it within `grace_s`."""
        try:
            async with asyncio.timeout(grace_s):
                if self._resumer is not None:
                    await self._resumer
                self._detach()
                if self._transport.get_write_buffer_size():
                    self._transport.set_write_buffer_limits(high=0)
                    await self._protocol.drained()
        except TimeoutError:
            self._drop()
        else:
            if not self._transport.is_closing():
                self._transport.set_write_buffer_limits()

    def sent_response(self) -> web.StreamResponse:
        """What the handler returns to aiohttp."""
        return AlreadySent(keep_alive=self._keep_alive)

    def _emit(self, frames: bytes) -> None:
        if self._preamble:
            frames, self._preamble = self._preamble + frames, b""
        # An empty chunk would end the body.
        data = b"%x\r\n%b\r\n" % (len(frames), frames) if self._chunked and frames else frames
        if self._ended and self._chunked:
            data += LAST_CHUNK
        if self._head:
            data = self._head + data
            self._head = b""
        self.direct = self._chunked and not self._ended
        self._is_silent = False
        self.write(data)
        if self._protocol.writing_paused:  # Also if an earlier answer on this connection filled the buffer.
            self.on_pause()

    async def _resume(self) -> None:
        """When the buffer has drained, send what was held; repeat if that filled it again."""
        try:
            while self.paused and not self.closed:
                await self._protocol.drained()
                self.paused = False
                self._num_held = 0
                frames = b"".join([*(holder.take_held() for holder in self._holders), *self._tail])
                self._tail.clear()
                if frames and not self.closed:
                    self._emit(frames)
                else:
                    is_open = self.started and not self._preamble and not self._ended and not self.closed
                    self.direct = self._chunked and is_open
        except ConnectionError:
            self.close()
        finally:
            self._resumer = None


def comment(text: str) -> bytes:
    """A line that clients of server-sent events skip."""
    return b": %b\n\n" % " ".join(text.split()).encode()


def _ignore(unread_bytes: int) -> None:
    pass


def _head(request_id: str, media_type: str, headers: Mapping[str, str], *, chunked: bool, keep_alive: bool) -> bytes:
    lines = [
        "HTTP/1.1 200 OK" if chunked else "HTTP/1.0 200 OK",
        f"Content-Type: {media_type}",
        "Cache-Control: no-cache",
        "X-Accel-Buffering: no",
        f"X-Request-Id: {request_id}",
        f"Date: {formatdate(usegmt=True)}",
        "Server: millrace",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    if chunked:
        lines.append("Transfer-Encoding: chunked")
    if not keep_alive:
        lines.append("Connection: close")
    return "\r\n".join([*lines, "", ""]).encode()
