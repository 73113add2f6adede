"""HTTP to replicas: answers cut out of bytes however they come, connections that carry one request after another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from millrace.errors import BadRequest
from millrace.gateway.replica_http.answer_parser import AnswerParser, BrokenAnswer
from millrace.gateway.replica_http.client import ReplicaClient
from millrace.gateway.replica_http.connection import READ_BUFFER_BYTES, Answer, Connection

CHUNKED = (
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-A: b\r\n\r\n"
    b"5\r\nhello\r\n6;x=y\r\n world\r\n0\r\nX-Trailer: 1\r\n\r\n"
)
SIZED = b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\nhello world"


def parsed(data: bytes, size: int, method: str = "POST") -> tuple[AnswerParser, list[bytes]]:
    parser = AnswerParser(method)
    pieces = [parser.feed(data[at : at + size]) for at in range(0, len(data), size)]
    return parser, [one for one in pieces if one]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 1000])
def test_bodies_are_cut_however_the_bytes_come(size: int) -> None:
    for data in (CHUNKED, SIZED):
        parser, pieces = parsed(data, size)
        assert b"".join(pieces) == b"hello world"
        assert parser.can_reuse
    parser, pieces = parsed(CHUNKED, 1)
    assert pieces == [b"hello", b" world"], "chunks stay whole"
    assert parser.head is not None
    assert parser.head.headers["x-a"] == "b"


def test_a_short_chunk_after_a_long_one_in_parts_is_given_at_once() -> None:
    parser = AnswerParser("POST")
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert not parser.feed(head + b"3e8\r\n" + b"x" * 400)
    assert parser.feed(b"x" * 600 + b"\r\n5\r\nhe") == b"x" * 1000
    assert parser.feed(b"llo\r\n0\r") == b"hello"
    parser.feed(b"\n\r\n")
    assert parser.can_reuse


@pytest.mark.parametrize("at", range(1, 5))
def test_the_end_after_a_long_chunk_comes_in_two_parts(at: int) -> None:
    parser = AnswerParser("POST")
    parser.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n64\r\nx")
    end = b"0\r\n\r\n"
    assert parser.feed(b"x" * 99 + b"\r\n" + end[:at]) == b"x" * 100
    parser.feed(end[at:])
    assert parser.can_reuse


def test_where_a_body_ends() -> None:
    parser, pieces = parsed(b"HTTP/1.0 200 OK\r\n\r\nto the end", 4)
    assert not parser.has_ended
    parser.close()
    assert (b"".join(pieces), parser.has_ended, parser.can_reuse) == (b"to the end", True, False)
    assert parsed(b"HTTP/1.1 204 No Content\r\n\r\n", 9)[0].can_reuse
    assert parsed(SIZED[:-11], 9, "HEAD")[0].can_reuse
    assert not parsed(SIZED.replace(b"Con", b"Connection: close\r\nCon", 1), 9)[0].can_reuse
    assert not parsed(SIZED + b"more", 1000)[0].can_reuse, "nobody knows what else comes"
    for whole in (CHUNKED, SIZED):
        with pytest.raises(BrokenAnswer):
            parsed(whole[:-1], 1000)[0].close()


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX y: 1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: +1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length:\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0x5\r\nhello\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello!!\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfffffff\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 300,
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000,
        b"HTTP/1.1 102 Processing\r\n\r\n" * 4000 + SIZED,
    ],
)
def test_what_is_not_clear_is_broken(data: bytes) -> None:
    with pytest.raises(BrokenAnswer):
        parsed(data, 1 << 20)


class FakeTransport:
    """What a connection does to its socket."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.written: list[bytes] = []
        self.is_reading, self.is_closed = True, False
        self.is_aborted = False
        self.num_unsent = 0
        connection.connection_made(cast(Any, self))

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def get_write_buffer_size(self) -> int:
        return self.num_unsent

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.connection.connection_lost(None)

    def abort(self) -> None:
        self.is_aborted = True
        self.close()


def opened(freed: list[Connection]) -> tuple[Connection, FakeTransport]:
    connection = Connection(freed.append, lambda lost: None)
    return connection, FakeTransport(connection)


async def asked(connection: Connection) -> asyncio.Task[Answer]:
    task = asyncio.ensure_future(connection.ask("POST", b"request"))
    await asyncio.sleep(0)
    return task


def test_a_connection_is_used_again_before_the_last_reader_has_woken() -> None:
    async def check() -> None:
        freed: list[Connection] = []
        connection, _ = opened(freed)
        first = await asked(connection)
        connection.data_received(SIZED)
        assert freed == [connection]
        second = asyncio.ensure_future(connection.ask("POST", b"request"))
        assert await (await first).read() == b"hello world"
        await asyncio.sleep(0)
        connection.data_received(CHUNKED)
        assert await (await second).read() == b"hello world"
        assert len(freed) == 2

    asyncio.run(check())


def test_followed_answers_pause_and_end_with_what_their_reader_raises() -> None:
    async def check() -> None:
        connection, transport = opened([])
        task = await asked(connection)
        connection.data_received(CHUNKED[: CHUNKED.index(b"6;x")])
        answer = await task
        taken: list[bytes] = []

        def take(data: bytes) -> None:
            taken.append(data)
            if data == b"bad":
                raise ValueError("not a frame")
            answer.pause()

        answer.follow(take)
        assert (taken, transport.is_reading) == ([b"hello"], False)
        connection.data_received(b"2\r\nab\r\n")
        assert not await answer.stopped()
        assert taken == [b"hello"], "paused"
        answer.resume()
        assert taken == [b"hello", b"ab"]
        answer.resume()
        assert transport.is_reading
        connection.data_received(b"3\r\nbad\r\n")
        with pytest.raises(ValueError, match="not a frame"):
            await answer.stopped()
        assert transport.is_closed

    asyncio.run(check())


def test_an_answer_that_nobody_reads_is_not_read_on() -> None:
    async def check() -> None:
        connection, transport = opened([])
        task = await asked(connection)
        body = b"x" * (READ_BUFFER_BYTES + 1)
        connection.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (2 * len(body)) + body)
        assert not transport.is_reading
        pieces = (await task).pieces(60)
        assert await anext(pieces) == body
        assert transport.is_reading
        connection.data_received(body)
        assert [one async for one in pieces] == [body]

    asyncio.run(check())


def test_following_an_answer_reads_on_after_much_came_with_the_head() -> None:
    async def check() -> None:
        connection, transport = opened([])
        task = await asked(connection)
        body = b"x" * (READ_BUFFER_BYTES + 1)
        connection.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (2 * len(body)) + body)
        answer, taken = await task, []
        answer.follow(taken.append)
        assert (taken, transport.is_reading) == ([body], True)

    asyncio.run(check())


def test_an_answer_before_the_whole_request_was_sent_aborts_the_connection() -> None:
    """To close it gently would wait for a replica that reads nothing more."""

    async def check() -> None:
        freed: list[Connection] = []
        connection, transport = opened(freed)
        task = await asked(connection)
        transport.num_unsent = 1
        connection.data_received(SIZED)
        assert await (await task).read() == b"hello world"
        assert (freed, transport.is_aborted) == ([], True)

    asyncio.run(check())


@pytest.mark.parametrize(
    "lose", [lambda one: one.connection_lost(None), lambda one: one.data_received(b"no HTTP\r\n\r\n")]
)
def test_lost_connections_say_so(lose: Callable[[Connection], None]) -> None:
    async def check() -> None:
        connection, _ = opened([])
        task = await asked(connection)
        lose(connection)
        with pytest.raises(BrokenAnswer):
            await task

    asyncio.run(check())


def test_requests_name_a_path() -> None:
    async def check() -> None:
        client = ReplicaClient(1.0, lambda: 0.0)
        for path, headers in (("http://elsewhere/", {}), ("/x", {"A": "b\r\nC: d"})):
            with pytest.raises(BadRequest):
                await client.request("GET", "http://127.0.0.1:1", path, headers, b"")

    asyncio.run(check())


@pytest.mark.live
def test_many_requests_over_kept_connections_on_uvloop() -> None:
    """Its transports are no `asyncio.Transport`. A connection that the server closed is replaced."""
    import uvloop

    async def check() -> None:
        connections: list[asyncio.StreamWriter] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connections.append(writer)
            while head := await reader.readuntil(b"\r\n\r\n"):
                body = await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split()[0]))
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        client = ReplicaClient(5.0, asyncio.get_running_loop().time)

        async def ask(number: int) -> None:
            for turn in range(10):
                body = b"%d.%d" % (number, turn)
                answer = await client.request("POST", url, "/", {}, body)
                assert await answer.read() == body

        async with asyncio.timeout(60):
            await asyncio.gather(*map(ask, range(32)))
            assert len(connections) <= 32
            for writer in connections:
                writer.close()
            await ask(0)
        client.close()
        server.close()

    uvloop.run(check())
