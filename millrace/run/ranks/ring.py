"""Records between two processes: their bytes lie in a ring of shared memory, and a socket says where.

The socket wakes the reader, orders the memory of both processes, and closes when either of them ends. Nobody spins.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import tempfile
import threading
from dataclasses import dataclass

RING_BYTES = 16 << 20
_HEAD = struct.Struct("<BBxxII")
"""Of a part of a record: its kind, whether more parts follow, its offset in the ring and its length."""
_REPLY = struct.Struct("<BxxxI")
"""Of a reply: its kind and its length."""
_SEND_LIMIT = struct.pack("ll", 60, 0)
"""Seconds and microseconds for which a reader that takes nothing is waited for."""
FREED = 0
"""Kind of the replies that give bytes back to the writer. Others are the caller's."""


FREED_PARTS, MAX_PARTS = 8, 4
"""Bytes are given back when they are an eighth of the ring: seldom, and in time for a part of a record. A part is at
most a quarter of the ring, and skips less than that at its end."""


class RingClosed(Exception):
    """The other process has ended."""


@dataclass(frozen=True, slots=True)
class Reply:
    kind: int
    body: bytes


class RingWriter:
    """Rank 0's end. One thread writes, another one reads the replies."""

    def __init__(self, size: int = RING_BYTES) -> None:
        self._size = size
        self._fd = shared_memory(size)
        self._memory = mmap.mmap(self._fd, size)
        self._socket, self._far = socket.socketpair()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_LIMIT)
        self._at = self._used = 0
        """Where the next part goes, and bytes that the reader has not given back."""
        self._changed = threading.Condition()
        self._is_closed = False

    @property
    def far_fds(self) -> tuple[int, int]:
        """Of the memory and the socket, for the other process."""
        return self._fd, self._far.fileno()

    def started(self) -> None:
        """The other process has its file descriptors. It alone holds its end now."""
        self._far.close()
        os.close(self._fd)

    def write(self, kind: int, data: bytes, timeout_s: float) -> None:
        """Raises `RingClosed`, and a TimeoutError if there is no room for so long."""
        most = self._size // MAX_PARTS
        view, first = memoryview(data), 0
        while True:
            part = view[first : first + most]
            first += len(part)
            offset = self._take(len(part), timeout_s)
            self._memory[offset : offset + len(part)] = part
            try:
                self._socket.sendall(_HEAD.pack(kind, first < len(data), offset, len(part)))
            except BlockingIOError as error:
                raise TimeoutError from error
            except OSError as error:
                raise RingClosed from error
            if first >= len(data):
                return

    def _take(self, length: int, timeout_s: float) -> int:
        """The offset of so many bytes in a row. Those that the end of the ring cuts off count as used."""
        wraps = self._at + length > self._size
        skipped = self._size - self._at if wraps else 0

        def has_room() -> bool:
            return self._is_closed or self._used + skipped + length <= self._size

        with self._changed:
            if not self._changed.wait_for(has_room, timeout_s):
                raise TimeoutError
            if self._is_closed:
                raise RingClosed
            offset = 0 if wraps else self._at
            self._used += skipped + length
            self._at = offset + length
            return offset

    def read_reply(self) -> Reply:
        """Waits for the next reply but those that only give bytes back. Raises `RingClosed`."""
        while True:
            kind, length = _REPLY.unpack(_receive(self._socket, _REPLY.size))
            body = _receive(self._socket, length)
            if kind != FREED:
                return Reply(kind, body)
            with self._changed:
                self._used -= int.from_bytes(body, "little")
                self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        # Wakes the thread that waits for replies, which closing alone does not.
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return


class RingReader:
    """The other rank's end."""

    def __init__(self, memory_fd: int, socket_fd: int, size: int = RING_BYTES) -> None:
        self._memory = mmap.mmap(memory_fd, size)
        self._socket = socket.socket(fileno=socket_fd)
        self._size = size
        self._replying = threading.Lock()
        self._at = self._freed = 0
        """Where the next part may be, and bytes that are read and not given back yet."""

    def read(self) -> tuple[int, bytes]:
        """Waits for a record: its kind and its bytes. Raises `RingClosed`."""
        parts: list[bytes] = []
        while True:
            kind, has_more, offset, length = _HEAD.unpack(_receive(self._socket, _HEAD.size))
            parts.append(self._memory[offset : offset + length])
            skipped = self._size - self._at if offset < self._at else 0
            self._at = offset + length
            self._freed += skipped + length
            if self._freed >= self._size // FREED_PARTS:
                self.reply(FREED, self._freed.to_bytes(8, "little"))
                self._freed = 0
            if not has_more:
                return kind, parts[0] if len(parts) == 1 else b"".join(parts)

    def reply(self, kind: int, body: bytes = b"") -> None:
        """Threads may reply beside the one that reads."""
        try:
            with self._replying:
                self._socket.sendall(_REPLY.pack(kind, len(body)) + body)
        except OSError as error:
            raise RingClosed from error

    def close(self) -> None:
        self._socket.close()


def _receive(source: socket.socket, length: int) -> bytes:
    found = b""
    while len(found) < length:
        try:
            more = source.recv(length - len(found))
        except OSError as error:
            raise RingClosed from error
        if not more:
            raise RingClosed
        found += more
    return found


def shared_memory(size: int) -> int:
    """A file in memory without a name: it is gone when both processes are."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("millrace-steps")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd
