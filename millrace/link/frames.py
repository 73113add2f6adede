"""Frames on a byte stream: each message is preceded by its length.

Both ends of a socket use these two classes. A message is usually written by a single call. What the peer does not
accept at once stays queued in the writer until the peer has room again.
"""

from __future__ import annotations

import socket
import struct
from collections import deque

HEADER = struct.Struct("<Q")
READ_BYTES = 1 << 18
"""Size of the read buffer. A longer frame gets a buffer of its own while it arrives."""


class FrameReader:
    """Splits received bytes into frames. The buffer is reused: decode a frame before the next call of `room`."""

    def __init__(self, capacity: int = READ_BYTES) -> None:
        self._usual = memoryview(bytearray(max(capacity, HEADER.size)))
        self._view = self._usual
        self._begin = self._end = 0

    def room(self) -> memoryview:
        """Buffer for the next bytes, at least as long as the rest of the current frame (or a header)."""
        if self._begin == self._end:
            self._view = self._usual
            self._begin = self._end = 0
        elif self._begin + (needed := self._needed()) > len(self._view):
            self._move(needed)
        return self._view[self._end :]

    def filled(self, num_bytes: int) -> None:
        """`num_bytes` were written to the beginning of `room`."""
        self._end += num_bytes

    def next_frame(self) -> memoryview | None:
        """The body of the next complete frame, or None."""
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
        """Move the current frame to the start of a buffer that can hold all of it."""
        begun = bytes(self._view[self._begin : self._end])
        self._view = self._usual if needed <= len(self._usual) else memoryview(bytearray(needed))
        self._view[: len(begun)] = begun
        self._begin, self._end = 0, len(begun)


class FrameWriter:
    """Frames to be sent to one peer, in order. The first may have been sent in part.

    Never blocks, and never raises because of the peer: a peer that is gone is detected by reading, after everything it
    sent has been read. Until then its frames stay queued.
    """

    def __init__(self) -> None:
        self._frames: deque[bytes | bytearray] = deque()
        self._sent = 0
        """Bytes of the first frame already sent."""

    @property
    def is_waiting(self) -> bool:
        return bool(self._frames)

    def put(self, frame: bytes | bytearray) -> None:
        self._frames.append(frame)

    def write(self, sock: socket.socket, frame: bytes | bytearray) -> None:
        """Send the frame after those already queued, and queue what the peer does not accept."""
        if self._frames:
            self._frames.append(frame)
            self.flush(sock)
            return
        sent = _send(sock, frame)
        if sent < len(frame):
            self._frames.append(frame)
            self._sent = sent

    def flush(self, sock: socket.socket) -> None:
        """Send queued frames as far as the peer accepts them."""
        while self._frames:
            frame = self._frames[0]
            self._sent += _send(sock, memoryview(frame)[self._sent :])
            if self._sent < len(frame):
                return
            self._frames.popleft()
            self._sent = 0

    def rewind(self) -> None:
        """For a new connection: send a partly sent frame again from its start."""
        self._sent = 0

    def keep_latest(self, max_frames: int) -> None:
        """Drop the oldest queued frames beyond `max_frames`."""
        while len(self._frames) > max_frames:
            self._frames.popleft()


def _send(sock: socket.socket, data: bytes | bytearray | memoryview) -> int:
    try:
        return sock.send(data, socket.MSG_NOSIGNAL)
    except (BlockingIOError, ConnectionError):
        return 0
