"""The engine's end of the channel: a listening Unix socket with one connection per front.

A front connects and sends its index as the first frame. The engine's own thread reads and writes: waking another
thread, which would then wait for the interpreter, takes longer than handling a message.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import socket
import threading
import time

from millrace.link.address import engine_path, unix_socket, with_large_buffers
from millrace.link.frames import FrameReader, FrameWriter
from millrace.link.messages import Stop, ToEngine, ToFront, decode_to_engine, encode_frame

log = logging.getLogger(__name__)

CLOSE_GRACE_S = 1.0
"""How long `close` waits for fronts to read the last messages."""
MAX_QUEUED = 4096
"""Messages kept for a front that is not connected. Beyond that the oldest are dropped."""
MAX_EVENTS = 64
MAX_READS = 16
"""Reads from one connection before others are served."""


class Connection:
    """An accepted connection. Its front is known after the first frame."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = with_large_buffers(sock)
        self.descriptor = sock.fileno()
        self.reader = FrameReader()
        self.front: Front | None = None
        self.awaits_room = False
        """True while epoll watches for the socket to become writable."""


class Front:
    """The state of one front, connected or not."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.writer = FrameWriter()
        self.connection: Connection | None = None


class SocketEngineChannel:
    """Used by the engine's thread only, except `request_stop`. Messages are queued per front, so a front that is late,
    slow or gone delays no other."""

    def __init__(self, directory: str, num_fronts: int) -> None:
        self.num_fronts = num_fronts
        self._fronts = [Front(index) for index in range(num_fronts)]
        self._connections: dict[int, Connection] = {}
        self._early: list[ToEngine] = []
        """Messages that arrived during `send`."""
        self._closed = False
        self._lock = threading.Lock()
        """Held by `close` and `request_stop`, so that no thread writes to a closed and reused descriptor."""
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._listener = _listen(engine_path(directory))
        self._epoll = select.epoll()
        self._epoll.register(self._wake, select.EPOLLIN)
        self._epoll.register(self._listener, select.EPOLLIN)

    # -- receiving -------------------------------------------------------------------------------------------------

    def receive(self, timeout_s: float | None, poll_s: float = 0.0) -> list[ToEngine]:
        messages = self._turn(0.0)
        if messages or (timeout_s is not None and timeout_s <= 0):
            return messages
        start = time.monotonic()
        end = start + timeout_s if timeout_s is not None else math.inf
        poll_until = min(start + poll_s, end)
        # Polling epoll is cheaper than a read that finds nothing and raises.
        while not messages and time.monotonic() < poll_until:
            messages = self._turn(0.0)
        while not messages and (left_s := end - time.monotonic()) > 0:
            messages = self._turn(None if left_s == math.inf else left_s)
        return messages

    def _turn(self, timeout_s: float | None) -> list[ToEngine]:
        """Wait for events and handle them. Returns the messages received."""
        messages, self._early = self._early, []
        for descriptor, events in self._epoll.poll(timeout_s, MAX_EVENTS):
            connection = self._connections.get(descriptor)
            if connection is not None:
                if events & select.EPOLLOUT:
                    self._flush(connection)
                if events & ~select.EPOLLOUT:
                    messages += self._read(connection)
            elif descriptor == self._wake:
                os.eventfd_read(self._wake)
                messages.append(Stop())
            elif descriptor == self._listener.fileno():
                self._accept()
        return messages

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
            while True:
                connection = Connection(self._listener.accept()[0])
                self._connections[connection.descriptor] = connection
                self._epoll.register(connection.descriptor, select.EPOLLIN)

    def _read(self, connection: Connection) -> list[ToEngine]:
        """Read what has arrived, up to `MAX_READS` times. Drops the connection at its end."""
        messages: list[ToEngine] = []
        for _ in range(MAX_READS):
            room = connection.reader.room()
            try:
                num_bytes = connection.sock.recv_into(room)
            except BlockingIOError:
                break
            except ConnectionError:
                num_bytes = 0
            if num_bytes == 0:
                self._drop(connection)
                break
            connection.reader.filled(num_bytes)
            messages += self._frames(connection)
            if num_bytes < len(room) or connection.descriptor not in self._connections:
                break
        return messages

    def _frames(self, connection: Connection) -> list[ToEngine]:
        messages: list[ToEngine] = []
        while (frame := connection.reader.next_frame()) is not None:
            if connection.front is not None:
                messages.append(decode_to_engine(frame))
                continue
            messages += self._identify(connection, int.from_bytes(frame, "little"))
            if connection.front is None:
                break
        return messages

    def _identify(self, connection: Connection, index: int) -> list[ToEngine]:
        """A front sent its index. If it was restarted, its old connection is read to the end and replaced."""
        if index >= self.num_fronts:
            log.error("rejecting a front with index %d: there are only %d fronts", index, self.num_fronts)
            self._drop(connection)
            return []
        front = self._fronts[index]
        last_messages = self._read(front.connection) if front.connection is not None else []
        if front.connection is not None:
            self._drop(front.connection)
        front.connection, connection.front = connection, front
        self._flush(connection)
        return last_messages

    def _drop(self, connection: Connection) -> None:
        if self._connections.pop(connection.descriptor, None) is None:
            return
        self._epoll.unregister(connection.descriptor)
        connection.sock.close()
        front = connection.front
        if front is not None and front.connection is connection:
            front.connection = None
            front.writer.rewind()
            front.writer.keep_latest(MAX_QUEUED)

    # -- sending ---------------------------------------------------------------------------------------------------

    def send(self, front_index: int, message: ToFront) -> None:
        self._send_frame(self._fronts[front_index], encode_frame(message))

    def send_all(self, message: ToFront) -> None:
        frame = encode_frame(message)
        for front in self._fronts:
            self._send_frame(front, frame)

    def _send_frame(self, front: Front, frame: bytearray) -> None:
        if front.connection is None:
            # Accept its connection if one is waiting: while loading, the engine sends but does not receive.
            self._early = self._turn(0.0)
        connection = front.connection
        if connection is None:
            front.writer.put(frame)
            front.writer.keep_latest(MAX_QUEUED)
            return
        front.writer.write(connection.sock, frame)
        if front.writer.is_waiting:
            self._await_room(connection, True)

    def _flush(self, connection: Connection) -> None:
        if connection.front is not None:
            connection.front.writer.flush(connection.sock)
            self._await_room(connection, connection.front.writer.is_waiting)

    def _await_room(self, connection: Connection, awaits: bool) -> None:
        if awaits != connection.awaits_room:
            connection.awaits_room = awaits
            self._epoll.modify(connection.descriptor, select.EPOLLIN | (select.EPOLLOUT if awaits else 0))

    # -- the end ---------------------------------------------------------------------------------------------------

    def request_stop(self) -> None:
        """Stop the engine from another thread, for example when the parent process is gone."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        if self._closed:
            return
        end = time.monotonic() + CLOSE_GRACE_S
        while any(front.writer.is_waiting for front in self._fronts) and (left_s := end - time.monotonic()) > 0:
            self._turn(left_s)
        with self._lock:
            self._closed = True
            for connection in list(self._connections.values()):
                self._drop(connection)
            self._epoll.close()
            self._listener.close()
            os.close(self._wake)


def _listen(path: str) -> socket.socket:
    """Listen at `path`, for the owner only. Replaces a socket left by a dead engine."""
    listener = unix_socket()
    os.fchmod(listener.fileno(), 0o600)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener.bind(path)
    listener.listen()
    return listener
