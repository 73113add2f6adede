"""The engine's end of the channel: one listening Unix socket, one connection for each front, one thread.

A front connects, says its number in a first frame, and both directions go over that connection. The engine's own
thread reads and writes: a thread for each direction would have to be woken, and to win the interpreter from a busy
loop, for every message, which takes longer than the message.
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
"""How long the last words of an engine are kept for a front that is not connected or does not read."""
MOST_FOR_ABSENT = 4096
"""Messages kept for a front that is not connected; beyond it the oldest go. A front that comes back asks anew."""
MOST_EVENTS = 64
MOST_READS = 16
"""Reads from one connection before the others have their turn."""


class Connection:
    """One that was accepted: of a front once it has said which."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = with_large_buffers(sock)
        self.descriptor = sock.fileno()
        self.reader = FrameReader()
        self.front: Front | None = None
        self.awaits_room = False
        """Whether the poll reports when it can be written to."""


class Front:
    """What the engine holds for one front, whether it is there or not."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.writer = FrameWriter()
        self.connection: Connection | None = None


class SocketEngineChannel:
    """Used by the engine's thread alone, but for `request_stop`. Fronts that come late, read slowly or have gone hold
    nobody up: what is for them waits aside, each front's apart, and goes in order."""

    def __init__(self, directory: str, num_fronts: int) -> None:
        self.num_fronts = num_fronts
        self._fronts = [Front(index) for index in range(num_fronts)]
        self._connections: dict[int, Connection] = {}
        self._early: list[ToEngine] = []
        """What arrived while something was sent."""
        self._closed = False
        self._lock = threading.Lock()
        """Held to close and to wake, so that no other thread wakes a descriptor that has become another's."""
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._listener = _listen(engine_path(directory))
        self._epoll = select.epoll()
        self._epoll.register(self._wake, select.EPOLLIN)
        self._epoll.register(self._listener, select.EPOLLIN)

    # -- receiving -------------------------------------------------------------------------------------------------

    def receive(self, timeout_s: float | None, watch_s: float = 0.0) -> list[ToEngine]:
        messages = self._turn(0.0)
        if messages or (timeout_s is not None and timeout_s <= 0):
            return messages
        start = time.monotonic()
        end = start + timeout_s if timeout_s is not None else math.inf
        awake_until = min(start + watch_s, end)
        # Asking for what is ready costs less than a read that finds nothing, which is an exception.
        while not messages and time.monotonic() < awake_until:
            messages = self._turn(0.0)
        while not messages and (left_s := end - time.monotonic()) > 0:
            messages = self._turn(None if left_s == math.inf else left_s)
        return messages

    def _turn(self, timeout_s: float | None) -> list[ToEngine]:
        """Wait for something to happen, and do what it asks for."""
        messages, self._early = self._early, []
        for descriptor, events in self._epoll.poll(timeout_s, MOST_EVENTS):
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
        """Everything that is there, within reason; a connection that has ended goes once it has been read."""
        messages: list[ToEngine] = []
        for _ in range(MOST_READS):
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
            messages += self._meet(connection, int.from_bytes(frame, "little"))
            if connection.front is None:
                break
        return messages

    def _meet(self, connection: Connection, index: int) -> list[ToEngine]:
        """A front says its number. One that was started again takes the place of its forerunner, whose last words
        are heard first."""
        if index >= self.num_fronts:
            log.error("a front says that it is number %d, and there are %d; it is turned away", index, self.num_fronts)
            self._drop(connection)
            return []
        front = self._fronts[index]
        last_words = self._read(front.connection) if front.connection is not None else []
        if front.connection is not None:
            self._drop(front.connection)
        front.connection, connection.front = connection, front
        self._flush(connection)
        return last_words

    def _drop(self, connection: Connection) -> None:
        if self._connections.pop(connection.descriptor, None) is None:
            return
        self._epoll.unregister(connection.descriptor)
        connection.sock.close()
        front = connection.front
        if front is not None and front.connection is connection:
            front.connection = None
            front.writer.rewind()
            front.writer.keep_latest(MOST_FOR_ABSENT)

    # -- sending ---------------------------------------------------------------------------------------------------

    def send(self, front_index: int, message: ToFront) -> None:
        front, frame = self._fronts[front_index], encode_frame(message)
        if front.connection is None:
            self._early = self._turn(0.0)  # It may be at the door: an engine that loads sends and does not receive.
        connection = front.connection
        if connection is None:
            front.writer.put(frame)
            front.writer.keep_latest(MOST_FOR_ABSENT)
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
        """Wake the engine from another thread of its own process, as when the parent has gone."""
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
    """For the owner alone. A socket that an engine left behind when it died is no obstacle."""
    listener = unix_socket()
    os.fchmod(listener.fileno(), 0o600)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener.bind(path)
    listener.listen()
    return listener
