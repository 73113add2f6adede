"""Framing: frames arrive whole and in order for any split of the bytes and any size of the peer's buffer."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from helpers.suite import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.link.frames import HEADER, READ_BYTES, FrameReader, FrameWriter


def framed(body: bytes) -> bytes:
    return HEADER.pack(len(body)) + body


def frames_of(reader: FrameReader) -> Iterator[bytes]:
    while (frame := reader.next_frame()) is not None:
        yield bytes(frame)


def feed(reader: FrameReader, data: bytes, most: int) -> Iterator[bytes]:
    """Write data to the reader, at most `most` bytes at a time, and yield the frames that come out."""
    while data:
        room = reader.room()
        assert len(room) > 0
        count = min(len(data), len(room), most)
        room[:count] = data[:count]
        reader.filled(count)
        data = data[count:]
        yield from frames_of(reader)


@settings(max_examples=examples(80), deadline=None)
@given(
    bodies=st.lists(st.binary(max_size=200), max_size=12),
    cuts=st.lists(st.integers(1, 300), min_size=1, max_size=12),
    capacity=st.integers(1, 120),
)
def test_any_split_of_the_bytes_gives_the_same_frames(bodies: list[bytes], cuts: list[int], capacity: int) -> None:
    reader, stream, out = FrameReader(capacity), b"".join(map(framed, bodies)), []
    turn = 0
    while stream:
        most = cuts[turn % len(cuts)]
        turn += 1
        out += feed(reader, stream[:most], most)
        stream = stream[most:]
    assert out == bodies


def test_a_frame_longer_than_the_buffer() -> None:
    reader = FrameReader()
    bodies = [b"a", bytes(3 * READ_BYTES + 5), b"b", b"", bytes(range(256)) * (READ_BYTES // 256), b"c"]
    assert list(feed(reader, b"".join(map(framed, bodies)), 70_001)) == bodies
    assert len(reader.room()) == READ_BYTES, "the long buffer is released"


def narrow_pair() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    ours.setblocking(False)
    theirs.setblocking(False)
    return ours, theirs


def read_all(sock: socket.socket, reader: FrameReader) -> list[bytes]:
    frames: list[bytes] = []
    while True:
        try:
            count = sock.recv_into(reader.room())
        except BlockingIOError:
            return frames
        reader.filled(count)
        frames += frames_of(reader)


@settings(max_examples=examples(15), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60_000), st.booleans()), max_size=20))
def test_a_slow_peer_receives_every_frame_unchanged(work: list[tuple[int, bool]]) -> None:
    """Frames of any length to a peer with a small buffer that reads now and then."""
    ours, theirs = narrow_pair()
    with ours, theirs:
        writer, reader, got = FrameWriter(), FrameReader(), []
        bodies = [bytes([number]) * length for number, (length, _) in enumerate(work)]
        for body, (_, reads) in zip(bodies, work, strict=True):
            writer.write(ours, framed(body))
            if reads:
                got += read_all(theirs, reader)
        while writer.is_waiting:
            got += read_all(theirs, reader)
            writer.flush(ours)
        assert got + read_all(theirs, reader) == bodies


def test_a_partly_sent_frame_is_sent_again_on_the_next_connection() -> None:
    writer, body = FrameWriter(), bytes(100_000)
    ours, theirs = narrow_pair()
    with ours, theirs:
        writer.write(ours, framed(body))
        writer.put(framed(b"after"))
        assert writer.is_waiting
    ours, theirs = narrow_pair()
    reader, got = FrameReader(), []
    with ours, theirs:
        writer.rewind()
        while writer.is_waiting:
            writer.flush(ours)
            got += read_all(theirs, reader)
    assert got == [body, b"after"]


def test_writing_to_a_peer_that_is_gone_keeps_the_frames() -> None:
    writer = FrameWriter()
    ours, theirs = narrow_pair()
    theirs.close()
    with ours:
        for number in range(5):
            writer.write(ours, framed(bytes([number])))
        writer.keep_latest(2)
    ours, theirs = narrow_pair()
    with ours, theirs:
        writer.flush(ours)
        assert read_all(theirs, FrameReader()) == [b"\3", b"\4"]


@pytest.mark.parametrize("length", [0, 1, READ_BYTES - HEADER.size, READ_BYTES - HEADER.size + 1, READ_BYTES])
def test_frames_of_about_the_buffer_size(length: int) -> None:
    body = b"x" * length
    assert list(feed(FrameReader(), framed(body) * 3, READ_BYTES)) == [body] * 3
