"""How the clients of `millrace faults` read answers."""

from __future__ import annotations

import asyncio

import pytest
from helpers.waiting import LIMIT_S

from millrace.faults import kills
from millrace.faults.wire import Address
from millrace.supervise.engine_supervisor import MAX_RESTARTS, STABLE_S

pytestmark = pytest.mark.live

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = b'2d\r\ndata: {"choices":[{"text":"ab"}],"more":123}\n\r\n'
ANSWERS = {
    "completed": CHUNKED + EVENT + b"0\r\n\r\n",
    "failed": CHUNKED + EVENT + b'16\r\ndata: {"error": {"a"}}\n\r\n0\r\n\r\n',
    "refused": b'HTTP/1.1 503 Unavailable\r\nContent-Length: 13\r\n\r\n{"error": {}}',
    "wrong": CHUNKED + EVENT + EVENT + b"0\r\n\r\n",
    "cut": CHUNKED + EVENT + b"ff\r\nda",
}


@pytest.mark.parametrize("outcome", ANSWERS)
def test_an_answer_is_counted_when_it_ends_although_the_connection_stays_open(outcome: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(ANSWERS[outcome])
        if outcome == "cut":
            writer.close()

    async def run() -> kills.KillResult:
        result = kills.KillResult("engine")
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server, asyncio.timeout(LIMIT_S):
            port = server.sockets[0].getsockname()[1]
            # One client: the public entry starts many, and kills a process.
            await kills.stream_once(Address("127.0.0.1", port, "m"), result, 0, "ab")
            server.close()
        return result

    result = asyncio.run(run())
    counts = {name: getattr(result, name) for name in ANSWERS}
    assert counts == {name: int(name == outcome) for name in ANSWERS}


def test_a_number_of_kills_takes_as_long_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    monkeypatch.setattr(kills, "child_of", lambda pid, part: 4000 + len(killed))
    monkeypatch.setattr(kills, "await_recovery", lambda url, pid, part: 0.5)
    monkeypatch.setattr(kills.os, "kill", lambda pid, signal: killed.append(pid))
    monkeypatch.setattr(kills, "BEFORE_KILL_S", 0.0)

    async def streamed(address: Address, result: kills.KillResult, number: int, text: str) -> None:
        assert text == f"text {number}"
        result.completed += 1

    async def text(address: Address, number: int) -> str:
        return f"text {number}"

    monkeypatch.setattr(kills, "text_once", text)
    monkeypatch.setattr(kills, "stream_once", streamed)
    monkeypatch.setattr(kills.Address, "of", lambda url: Address("127.0.0.1", 1, "m"))
    result = asyncio.run(kills.kill_repeatedly("http://x", 1, "rank", 0.0, num_kills=3, num_streams=2))
    assert killed == [4000, 4001, 4002]
    assert (result.kills, result.completed, result.recovery_s) == (3, 6, [0.5] * 3)
    assert asyncio.run(kills.kill_repeatedly("http://x", 1, "rank", 0.0, num_streams=2)).kills == 1
    # A server gives up an engine that dies often without serving in between.
    rests: list[float] = []

    async def rest(seconds: float) -> None:
        if seconds:
            rests.append(seconds)

    monkeypatch.setattr(kills.asyncio, "sleep", rest)
    said: list[str] = []
    many = kills.kill_repeatedly("http://x", 1, "rank", 0.0, num_kills=21, num_streams=1, progress=said.append)
    assert asyncio.run(many).kills == 21
    assert rests == [kills.REST_S] * 4
    assert kills.BURST < MAX_RESTARTS
    assert kills.REST_S > STABLE_S
    assert said[0].startswith("3 of 21 kills; about")
    assert kills.shortest_s("rank", 21) == 4 * kills.REST_S
    rests.clear()
    assert asyncio.run(kills.kill_repeatedly("http://x", 1, "front", 0.0, num_kills=21, num_streams=1)).kills == 21
    assert rests == []


def test_a_drill_that_is_ended_early_has_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kills, "child_of", lambda pid, part: 4000)
    monkeypatch.setattr(kills, "await_recovery", lambda url, pid, part: 0.5)
    monkeypatch.setattr(kills.os, "kill", lambda pid, signal: None)
    monkeypatch.setattr(kills, "BEFORE_KILL_S", 0.0)
    monkeypatch.setattr(kills.Address, "of", lambda url: Address("127.0.0.1", 1, "m"))
    result, is_second = kills.KillResult("front"), asyncio.Event()

    async def text(address: Address, number: int) -> str:
        return ""

    async def streamed(address: Address, result: kills.KillResult, number: int, text: str) -> None:
        if result.kills:
            is_second.set()
            await asyncio.Event().wait()
        result.completed += 1

    monkeypatch.setattr(kills, "text_once", text)
    monkeypatch.setattr(kills, "stream_once", streamed)

    async def run() -> None:
        drill = asyncio.create_task(
            kills.kill_repeatedly("http://x", 1, "front", 0.0, num_kills=3, num_streams=2, result=result)
        )
        async with asyncio.timeout(LIMIT_S):
            while not result.recovery_s:
                await asyncio.sleep(0)
            await is_second.wait()
        drill.cancel()
        with pytest.raises(asyncio.CancelledError):
            await drill

    asyncio.run(run())
    assert (result.completed, result.recovery_s) == (2, [0.5])
