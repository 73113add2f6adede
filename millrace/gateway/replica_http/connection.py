"""One connection to a replica, and the answer that comes over it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import cast

from multidict import CIMultiDict

from millrace.gateway.replica_http.answer_parser import AnswerParser, BrokenAnswer

READ_BUFFER_BYTES = 1 << 16
"""An answer that nobody takes is read only so far."""


class Answer:
    """An answer whose head has come. Its body is read whole, in pieces, or is given to a function as it arrives."""

    def __init__(self, connection: Connection, status: int, headers: CIMultiDict[str]) -> None:
        self.status = status
        self.headers = headers
        self._connection = connection
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        self._limit: float = READ_BUFFER_BYTES
        self._take: Callable[[bytes], None] | None = None
        self._error: Exception | None = None
        self._has_ended = False
        self._is_paused = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def content_type(self) -> str:
        return self.headers.get("Content-Type", "").partition(";")[0].strip().lower()

    @property
    def content_length(self) -> int | None:
        length = self.headers.get("Content-Length")
        return None if length is None else int(length)

    # ── called by the connection ──────────────────────────────────────────────────────────────────────────────────────
    def arrived(self, data: bytes) -> None:
        if self._take is not None and not self._is_paused:
            self._take(data)
            return
        self._pieces.append(data)
        self._num_bytes += len(data)
        if self._num_bytes > self._limit and not self._has_ended:
            self._connection.pause()
        self._wake()

    def ended(self, error: Exception | None = None) -> None:
        self._error, self._has_ended = self._error or error, True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # ── called by its reader ──────────────────────────────────────────────────────────────────────────────────────────
    def follow(self, take: Callable[[bytes], None]) -> None:
        """From now on `take` gets what arrives, when it arrives; what it raises ends the answer with that error."""
        self._take = take
        self.resume()

    def pause(self) -> None:
        """Called in `take`: read nothing more until `resume`."""
        if not self._is_paused:
            self._is_paused = True
            if not self._has_ended:
                self._connection.pause()
            self._wake()

    def resume(self) -> None:
        self._is_paused = False
        self._give_held()
        if not self._is_paused:
            self._read_on()

    async def stopped(self) -> bool:
        """Wait until a followed answer has ended (True) or was paused (False). Raises if it was lost."""
        while not (self._is_paused or self._has_ended):
            await self._wait()
        if self._is_paused:
            return False
        if self._error is not None:
            raise self._error
        return True

    async def read(self) -> bytes:
        """The rest of the body."""
        self._limit = float("inf")
        self._read_on()
        while not self._has_ended:
            await self._wait()
        if self._error is not None:
            raise self._error
        return self._taken()

    async def pieces(self, wait_s: float) -> AsyncIterator[bytes]:
        """The body as it comes, no faster than it is taken. `wait_s`: the longest wait for a piece."""
        while True:
            if self._pieces:
                piece = self._taken()
                self._read_on()
                yield piece
            elif self._error is not None:
                raise self._error
            elif self._has_ended:
                return
            else:
                async with asyncio.timeout(wait_s):
                    await self._wait()

    def close(self) -> None:
        """Idempotent. An answer that has ended leaves its connection to the next request."""
        if not self._has_ended:
            self._connection.lose(BrokenAnswer("the request was given up"))

    def _give_held(self) -> None:
        if self._pieces and self._take is not None:
            try:
                self._take(self._taken())
            except Exception as error:
                if self._has_ended:
                    self._error = error
                else:
                    self._connection.lose(error)

    def _read_on(self) -> None:
        """The connection of an answer that has ended belongs to another one."""
        if not self._has_ended:
            self._connection.resume()

    def _taken(self) -> bytes:
        pieces = b"".join(self._pieces)
        self._pieces.clear()
        self._num_bytes = 0
        return pieces

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


class Connection(asyncio.Protocol):
    """Carries one request at a time."""

    def __init__(self, on_free: Callable[[Connection], None], on_lost: Callable[[Connection], None]) -> None:
        self._on_free = on_free
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._parser: AnswerParser | None = None
        self._answer: Answer | None = None
        self._head: asyncio.Future[Answer] | None = None
        self._is_reading = True
        self.has_bytes = False
        """True once a byte of the answer has come."""
        self.free_since = 0.0

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def ask(self, method: str, request: bytes) -> Answer:
        """Send a request and wait for the head of its answer."""
        assert self._transport is not None
        self._parser, self._answer, self.has_bytes = AnswerParser(method), None, False
        head: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._head = head
        self._transport.write(request)
        try:
            return await head
        except asyncio.CancelledError:
            if self._head is head:  # Else the answer has ended, and the connection belongs to another request.
                self.lose(BrokenAnswer("the request was given up"))
            raise

    # ── the transport ─────────────────────────────────────────────────────────────────────────────────────────────────
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # That of uvloop is none by its class.

    def data_received(self, data: bytes) -> None:
        parser = self._parser
        if parser is None:
            self.lose(BrokenAnswer("bytes came that nobody asked for"))
            return
        self.has_bytes = True
        try:
            body = parser.feed(data)
            if self._answer is None and parser.head is not None:
                self._begin(parser)
            if body and self._answer is not None:
                self._answer.arrived(body)
        except Exception as error:
            self.lose(error)
            return
        if parser.has_ended and self._parser is not None:
            self._end(parser)

    def eof_received(self) -> bool:
        return False  # The transport closes itself.

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost(self)
        if self._parser is not None:
            error: Exception | None = exc
            if exc is None:
                try:
                    self._parser.close()
                except BrokenAnswer as broken:
                    error = broken
            self._finish(error)

    # ── one answer ────────────────────────────────────────────────────────────────────────────────────────────────────
    def _begin(self, parser: AnswerParser) -> None:
        assert parser.head is not None
        self._answer = Answer(self, parser.head.status, parser.head.headers)
        if self._head is not None and not self._head.done():
            self._head.set_result(self._answer)

    def _end(self, parser: AnswerParser) -> None:
        """The answer is complete. The connection is kept if the request has left it, too."""
        assert self._transport is not None
        self.resume()
        is_free = parser.can_reuse and self.is_open and not self._transport.get_write_buffer_size()
        self._finish(None)
        if is_free:
            self._on_free(self)
        else:
            self._transport.abort()

    def _finish(self, error: Exception | None) -> None:
        self._parser = None
        answer, self._answer = self._answer, None
        head, self._head = self._head, None
        if answer is not None:
            answer.ended(error)
        elif head is not None and not head.done():
            head.set_exception(error or BrokenAnswer("the connection closed, no answer"))

    def lose(self, error: Exception) -> None:
        """End the connection, and what is open on it."""
        if self._parser is not None:
            self._finish(error)
        if self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        if self._is_reading and self.is_open and self._transport is not None:
            self._is_reading = False
            self._transport.pause_reading()

    def resume(self) -> None:
        if not self._is_reading and self.is_open and self._transport is not None:
            self._is_reading = True
            self._transport.resume_reading()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
