"""A front's end of the channel: one connection to the engine's Unix socket, on the front's asyncio loop.

There is no receiving thread: it would compete with the loop for the interpreter, and decoding a message takes only
microseconds. While the engine does not listen, connecting is retried and messages to it are queued.
"""

from __future__ import annotations

import asyncio
import select
import socket
import time

from millrace.link.address import engine_path, unix_socket
from millrace.link.channel import OnMessage
from millrace.link.frames import HEADER, FrameReader, FrameWriter
from millrace.link.messages import ToEngine, decode_to_front, encode_frame

MAX_MESSAGES_PER_TURN = 32
"""Messages handled before the loop does other work."""
FIRST_RETRY_S = 0.002
MAX_RETRY_S = 0.1
CLOSE_GRACE_S = 0.2
"""How long `close` waits for the engine to read the last messages."""


class SocketFrontChannel:
    def __init__(self, directory: str, front_index: int) -> None:
        self._path = engine_path(directory)
        body = front_index.to_bytes(4, "little")
        self._greeting = HEADER.pack(len(body)) + body
        self._writer = FrameWriter()
        self._reader = FrameReader()
        self._sock: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_message: OnMessage | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._retry_s = FIRST_RETRY_S
        self._awaits_room = False
        self._has_more = False
        """True if frames already read wait for the loop's next turn."""
        self._closed = False
        self._connect()

    def start(self, loop: asyncio.AbstractEventLoop, on_message: OnMessage) -> None:
        self._loop, self._on_message = loop, on_message
        if self._sock is None:
            self._retry_later()
        else:
            self._watch(self._sock)

    # -- the connection --------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Try once. Connecting to a Unix socket succeeds or fails at once."""
        sock = unix_socket()
        try:
            sock.connect(self._path)
            sock.send(self._greeting, socket.MSG_NOSIGNAL)
        except (FileNotFoundError, BlockingIOError, ConnectionError):
            sock.close()
            return
        if self._retry is not None:
            self._retry.cancel()
        self._sock, self._retry_s = sock, FIRST_RETRY_S
        self._reader = FrameReader()
        self._writer.rewind()
        self._writer.flush(sock)
        self._watch(sock)

    def _watch(self, sock: socket.socket) -> None:
        if self._loop is not None:
            self._loop.add_reader(sock.fileno(), self._on_readable)
            self._await_room(sock)

    def _await_room(self, sock: socket.socket) -> None:
        """Watch for the socket to become writable as long as frames are queued."""
        if self._loop is None or self._writer.is_waiting == self._awaits_room:
            return
        self._awaits_room = self._writer.is_waiting
        if self._awaits_room:
            self._loop.add_writer(sock.fileno(), self._on_writable)
        else:
            self._loop.remove_writer(sock.fileno())

    def _disconnect(self) -> None:
        sock, self._sock = self._sock, None
        if sock is None:
            return
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(sock.fileno())
            self._loop.remove_writer(sock.fileno())
        self._awaits_room = False
        sock.close()

    def _retry_later(self) -> None:
        if self._loop is not None:
            self._retry = self._loop.call_later(self._retry_s, self._try_again)
            self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)

    def _try_again(self) -> None:
        if self._closed:
            return
        if self._sock is None:
            self._connect()
        if self._sock is None:
            self._retry_later()

    # -- receiving -------------------------------------------------------------------------------------------------

    def _on_readable(self) -> None:
        """Read once. If data is left, the loop calls again."""
        if self._sock is None or self._has_more:
            return
        try:
            num_bytes = self._sock.recv_into(self._reader.room())
        except BlockingIOError:
            return
        except ConnectionError:
            num_bytes = 0
        if num_bytes == 0:
            self._disconnect()
            self._retry_later()
            return
        self._reader.filled(num_bytes)
        self._deliver()

    def _deliver(self) -> None:
        """Deliver the frames read, a limited number per turn of the loop."""
        reader, self._has_more = self._reader, True
        try:
            for _ in range(MAX_MESSAGES_PER_TURN):
                frame = reader.next_frame()
                if frame is None or self._on_message is None:
                    self._has_more = False
                    return
                self._on_message(decode_to_front(frame))
        finally:
            if self._has_more and self._loop is not None:
                self._loop.call_soon(self._deliver)

    # -- sending ---------------------------------------------------------------------------------------------------

    def send(self, message: ToEngine) -> None:
        if self._closed:
            return
        frame = encode_frame(message)
        if self._sock is None:
            self._connect()
        if self._sock is None:
            self._writer.put(frame)
            return
        self._writer.write(self._sock, frame)
        self._await_room(self._sock)

    def _on_writable(self) -> None:
        if self._sock is not None:
            self._writer.flush(self._sock)
            self._await_room(self._sock)

    def close(self) -> None:
        if self._closed:
            return
        self._closed, self._on_message = True, None
        if self._retry is not None:
            self._retry.cancel()
        if self._sock is not None:
            self._send_rest(self._sock)
        self._disconnect()

    def _send_rest(self, sock: socket.socket) -> None:
        end = time.monotonic() + CLOSE_GRACE_S
        poll = select.poll()
        poll.register(sock, select.POLLOUT)
        while self._writer.is_waiting and (left_s := end - time.monotonic()) > 0:
            for _, events in poll.poll(1000 * left_s):
                if events & (select.POLLHUP | select.POLLERR):
                    return
            self._writer.flush(sock)
