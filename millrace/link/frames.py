"""Frames on a byte stream: each message is preceded by its length, so any cutting of the stream gives the same frames.

Both ends of a socket use these two classes. The usual message is one call to write; what a peer does not take at once
stays with the writer, whole frames in order, and is continued when the peer has room again.
"""

from __future__ import annotations

import socket
import struct
from collections import deque

HEADER = struct.Struct("<Q")
READ_BYTES = 1 << 18
"""What is read in one go; a longer frame gets a buffer of its own length while it arrives."""


class FrameReader:
    """Cuts what arrives into frames. The buffer is used again and again, so a frame is to be read before the next
    call of `room`."""

    def __init__(self, capacity: int = READ_BYTES) -> None:
        self._usual = memoryview(bytearray(max(capacity, HEADER.size)))
        self._view = self._usual
        self._begin = self._end = 0

    def room(self) -> memoryview:
        """Where the next bytes go: at least as much as the frame that has begun still needs, or one header."""
        if self._begin == self._end:
            self._view = self._usual
            self._begin = self._end = 0
        elif self._begin + (needed := self._needed()) > len(self._view):
            self._move(needed)
        return self._view[self._end :]

    def filled(self, num_bytes: int) -> None:
        """So many bytes were written to the beginning of `room`."""
        self._end += num_bytes

    def next_frame(self) -> memoryview | None:
        """The next whole frame's body, or None until more has arrived."""
        if self._end - self._begin < HEADER.size:
            return None
        body = self._begin + HEADER.size
        end = body + int(HEADER.unpack_from(self._view, self._begin)[0])
        if end > self._end:
            return None
        self._begin = end
        return self._view[body:end]

    def _needed(self) -> int:
        if self._end - self._begin < HEADER.size:
            return HEADER.size
        return HEADER.size + int(HEADER.unpack_from(self._view, self._begin)[0])

    def _move(self, needed: int) -> None:
        """Bring the frame that has begun to the start of a buffer that can hold all of it."""
        begun = bytes(self._view[self._begin : self._end])
        self._view = self._usual if needed <= len(self._usual) else memoryview(bytearray(needed))
        self._view[: len(begun)] = begun
        self._begin, self._end = 0, len(begun)


class FrameWriter:
    """What one peer is still to be sent: whole frames in order, the first of which may have gone in part.

    Never blocks and never raises for what the peer does. One that has gone is noticed by reading, where everything
    that it had said comes first; until then its frames stay here.
    """

    def __init__(self) -> None:
        self._frames: deque[bytes | bytearray] = deque()
        self._sent = 0
        """Bytes of the first frame that have gone."""

    @property
    def is_waiting(self) -> bool:
        return bool(self._frames)

    def put(self, frame: bytes | bytearray) -> None:
        self._frames.append(frame)

    def write(self, sock: socket.socket, frame: bytes | bytearray) -> None:
        """Send the frame now as far as the peer takes it, after whatever waits already."""
        if self._frames:
            self._frames.append(frame)
            self.flush(sock)
            return
        sent = _send(sock, frame)
        if sent < len(frame):
            self._frames.append(frame)
            self._sent = sent

    def flush(self, sock: socket.socket) -> None:
        """Go on with what waits."""
        while self._frames:
            frame = self._frames[0]
            self._sent += _send(sock, memoryview(frame)[self._sent :])
            if self._sent < len(frame):
                return
            self._frames.popleft()
            self._sent = 0

    def rewind(self) -> None:
        """For a new connection: a frame that went in part goes again, whole."""
        self._sent = 0

    def keep_latest(self, most: int) -> None:
        while len(self._frames) > most:
            self._frames.popleft()


def _send(sock: socket.socket, data: bytes | bytearray | memoryview) -> int:
    try:
        return sock.send(data, socket.MSG_NOSIGNAL)
    except (BlockingIOError, ConnectionError):
        return 0
