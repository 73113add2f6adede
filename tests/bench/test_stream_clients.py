"""The load generator's streams: waiting for the first token is not the first token."""

from __future__ import annotations

import asyncio

import pytest

from millrace.bench.http import stream_clients
from millrace.bench.http.stream_clients import Stream, Tally

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
WAITING = b"9\r\n: waits\n\n\r\n"
FRAME = b'd\r\ndata: {"a":1}\n\n\r\n'
LAST = b'14\r\ndata: {"f":"length"}\n\n\r\n0\r\n\r\n'


class Transport(asyncio.Transport):
    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def abort(self) -> None:
        pass


def test_the_time_to_the_first_token_ends_with_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(stream_clients.time, "monotonic", lambda: now[0])
    tally = Tally()
    stream = Stream(tally, (b"", b""))
    stream.connection_made(Transport())
    stream.begin((0.0, 0.0, 100.0, 100.0))
    for at, data in [(2.0, HEAD + WAITING), (7.0, WAITING), (9.0, FRAME), (14.0, WAITING), (15.0, LAST)]:
        now[0] = at
        stream.data_received(data)
    assert list(tally.burst_s) == [9.0]
    assert list(tally.gap_s) == [6.0]
    assert (tally.requests, tally.errors, tally.frames) == (1, 0, 2)


def test_an_error_instead_of_a_stream_is_counted() -> None:
    tally = Tally()
    stream = Stream(tally, (b"", b""))
    stream.connection_made(Transport())
    stream.begin((0.0, 0.0, 100.0, 100.0))
    stream.data_received(b'HTTP/1.1 429 Too Many Requests\r\n\r\n{"error":{}}')
    assert tally.errors == 1
