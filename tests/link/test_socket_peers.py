"""Peers over Unix sockets that connect early, reconnect, read slowly, send a lot, or die within a frame."""

from __future__ import annotations

import asyncio
import socket
import stat
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import uvloop
from helpers.waiting import LIMIT_S, until
from helpers.watched_epoll import WatchedEpoll

from millrace.errors import ConfigError
from millrace.link import front_end
from millrace.link.address import engine_path
from millrace.link.engine_end import MAX_QUEUED, SocketEngineChannel
from millrace.link.front_end import MAX_MESSAGES_PER_TURN, SocketFrontChannel
from millrace.link.messages import (
    Abort,
    EngineFailed,
    Hello,
    NewRequest,
    StepTokens,
    Stop,
    ToEngine,
    ToFront,
    encode_frame,
)
from millrace.params.sampling import SamplingParams

pytestmark = pytest.mark.live

RunLoop = Callable[[Awaitable[None]], None]


@pytest.fixture
def directory() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="mr-") as path:
        yield path


@pytest.fixture(params=["asyncio", "uvloop"])
def run_loop(request: pytest.FixtureRequest) -> RunLoop:
    return asyncio.run if request.param == "asyncio" else uvloop.run  # type: ignore[return-value]


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[socket.socket]:
    """The sockets with which fronts have tried to connect."""
    made: list[socket.socket] = []
    make = front_end.unix_socket

    def recorded() -> socket.socket:
        made.append(make())
        return made[-1]

    monkeypatch.setattr(front_end, "unix_socket", recorded)
    return made


def step(number: int, size: int = 0) -> StepTokens:
    return StepTokens(step_no=number, ids=bytes(size), tokens=b"")


class RecordingFront:
    """A started front that records its messages and can wait for more while the engine keeps running."""

    def __init__(self, channel: SocketFrontChannel) -> None:
        self.channel = channel
        self.messages: list[ToFront] = []
        channel.start(asyncio.get_running_loop(), self.messages.append)

    @property
    def steps(self) -> list[int]:
        return [message.step_no for message in self.messages if isinstance(message, StepTokens)]

    async def wait_for(self, count: int, engine: SocketEngineChannel) -> list[ToEngine]:
        """Wait until `count` messages have arrived. Returns what the engine received meanwhile."""
        received: list[ToEngine] = []

        def is_done() -> bool:
            received.extend(engine.receive(0.0))
            return len(self.messages) >= count

        await until(is_done)
        return received


async def engine_receives(engine: SocketEngineChannel, count: int) -> list[ToEngine]:
    """The next `count` messages that reach the engine, while the loop keeps running."""
    messages: list[ToEngine] = []

    def is_done() -> bool:
        messages.extend(engine.receive(0.0))
        return len(messages) >= count

    await until(is_done)
    return messages


def ids_of(messages: list[ToEngine]) -> list[int]:
    return [message.ids[0] for message in messages if isinstance(message, Abort)]


def raw_front(directory: str, index: int) -> socket.socket:
    """A front that speaks the protocol byte by byte."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(LIMIT_S)
    sock.connect(engine_path(directory))
    sock.sendall((4).to_bytes(8, "little") + index.to_bytes(4, "little"))
    return sock


def test_a_front_that_starts_before_the_engine_loses_nothing(
    directory: str, run_loop: RunLoop, attempts: list[socket.socket]
) -> None:
    async def work() -> None:
        front = SocketFrontChannel(directory, 0)
        front.send(Abort((0,)))
        recorder = RecordingFront(front)
        front.send(Abort((1,)))
        await until(lambda: len(attempts) > 5)
        engine = SocketEngineChannel(directory, 1)
        assert ids_of(await engine_receives(engine, 2)) == [0, 1]
        front.send(Abort((2,)))
        engine.send(0, step(7))
        assert ids_of(await engine_receives(engine, 1)) == [2]
        await recorder.wait_for(1, engine)
        assert recorder.steps == [7]
        front.close()
        engine.close()

    run_loop(work())


def test_an_engine_that_only_sends_while_loading_accepts_its_fronts(directory: str) -> None:
    async def work() -> None:
        engine = SocketEngineChannel(directory, 2)
        fronts = [RecordingFront(SocketFrontChannel(directory, index)) for index in range(2)]
        fronts[0].channel.send(Hello(0))
        for number in range(20):
            for index in range(2):
                engine.send(index, step(number))
        await until(lambda: all(len(recorder.steps) == 20 for recorder in fronts))
        assert [recorder.steps for recorder in fronts] == [list(range(20))] * 2
        assert engine.receive(0.0) == [Hello(0)], "messages that arrived meanwhile are not lost"
        for recorder in fronts:
            recorder.channel.close()
        engine.close()

    asyncio.run(work())


def test_a_front_that_does_not_read_delays_neither_engine_nor_sibling(
    directory: str, run_loop: RunLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """60 MB for a stopped front: sent without blocking, and received in order when it continues."""
    size, count = 300_000, 200
    epoll = WatchedEpoll.install(monkeypatch)

    async def work() -> None:
        engine = SocketEngineChannel(directory, 2)
        stopped, sibling = raw_front(directory, 0), RecordingFront(SocketFrontChannel(directory, 1))
        for number in range(count):
            engine.send(0, step(number, size))
            engine.send(1, step(number))
        await sibling.wait_for(count, engine)
        assert sibling.steps == list(range(count))
        epoll.timeouts.clear()
        assert engine.receive(0.05) == []
        assert len(epoll.timeouts) < 5, "waiting for buffer space does not spin"
        expected = b"".join(encode_frame(step(number, size)) for number in range(count))
        reading = threading.Thread(target=read_exactly, args=(stopped, expected, found := []))
        reading.start()
        while reading.is_alive():
            engine.receive(0.01)
            await asyncio.sleep(0)
        assert found == [True]
        stopped.close()
        sibling.channel.close()
        engine.close()

    run_loop(work())


def read_exactly(sock: socket.socket, expected: bytes, found: list[bool]) -> None:
    got = bytearray()
    while len(got) < len(expected) and (data := sock.recv(1 << 20)):
        got += data
    found.append(bytes(got) == expected)


def test_a_prompt_of_millions_of_tokens_blocks_neither_loop(directory: str, run_loop: RunLoop) -> None:
    prompt = bytes(range(256)) * 102_400  # 6.5 million tokens, 26 MB

    async def work() -> None:
        engine = SocketEngineChannel(directory, 1)
        front = SocketFrontChannel(directory, 0)
        RecordingFront(front)
        front.send(NewRequest(id=1, prompt=prompt, params=SamplingParams()))
        front.send(Abort((2,)))
        messages = await engine_receives(engine, 2)
        assert isinstance(messages[0], NewRequest)
        assert messages[0].prompt == prompt
        assert messages[1] == Abort((2,))
        front.close()
        engine.close()

    run_loop(work())


def test_a_new_engine_at_the_same_path(directory: str, run_loop: RunLoop, attempts: list[socket.socket]) -> None:
    """The first engine dies and leaves its socket file behind."""

    async def work() -> None:
        first = SocketEngineChannel(directory, 1)
        recorder = RecordingFront(SocketFrontChannel(directory, 0))
        first.send(0, step(1))
        await recorder.wait_for(1, first)
        first.close()
        await until(lambda: len(attempts) > 1)
        recorder.channel.send(Abort((1,)))
        recorder.channel.send(Abort((2,)))
        assert Path(engine_path(directory)).exists()
        second = SocketEngineChannel(directory, 1)
        assert ids_of(await engine_receives(second, 2)) == [1, 2]
        second.send(0, step(2))
        await recorder.wait_for(2, second)
        assert recorder.steps == [1, 2]
        recorder.channel.close()
        second.close()

    run_loop(work())


def test_the_last_messages_of_a_dead_engine_reach_a_front_that_sends_to_it(directory: str, run_loop: RunLoop) -> None:
    async def work() -> None:
        engine = SocketEngineChannel(directory, 1)
        front = SocketFrontChannel(directory, 0)
        front.send(Hello(0))
        await engine_receives(engine, 1)
        for number in range(10):
            engine.send(0, step(number))
        engine.send(0, EngineFailed("out of memory"))
        engine.close()
        for number in range(10):
            front.send(Abort((number,)))
        recorder = RecordingFront(front)
        await until(lambda: len(recorder.messages) >= 11)
        assert recorder.steps == list(range(10))
        assert recorder.messages[-1] == EngineFailed("out of memory")
        front.close()

    run_loop(work())


def test_a_restarted_front_replaces_its_old_connection(directory: str) -> None:
    async def work() -> None:
        engine = SocketEngineChannel(directory, 2)
        old = SocketFrontChannel(directory, 1)
        old.send(Abort((1,)))
        assert ids_of(await engine_receives(engine, 1)) == [1]
        old.send(Abort((2,)))
        new = RecordingFront(SocketFrontChannel(directory, 1))
        new.channel.send(Abort((3,)))
        assert sorted(ids_of(await engine_receives(engine, 2))) == [2, 3], (
            "the last messages of the old connection are received"
        )
        engine.send(1, step(5))
        await new.wait_for(1, engine)
        assert new.steps == [5]
        old.close()
        engine.receive(0.01)
        engine.send(1, step(6))
        await new.wait_for(2, engine)
        assert new.steps == [5, 6]
        new.channel.close()
        engine.close()

    asyncio.run(work())


def test_a_front_that_dies_within_a_frame_leaves_whole_frames_to_the_next(directory: str) -> None:
    size, count = 100_000, 160

    async def work() -> None:
        engine = SocketEngineChannel(directory, 1)
        dead = raw_front(directory, 0)
        dead.sendall(encode_frame(Abort((1,))) + encode_frame(Abort((2,)))[:-1])
        assert ids_of(await engine_receives(engine, 1)) == [1]
        for number in range(count):
            engine.send(0, step(number, size))
        dead.recv(1000)
        dead.close()
        engine.receive(0.01)
        new = RecordingFront(SocketFrontChannel(directory, 0))
        engine.send(0, step(count))
        await until(lambda: not engine.receive(0.0) and new.steps[-1:] == [count])
        first = new.steps[0]
        assert 0 < first < count, "some frames were sent to the dead front"
        assert new.steps == list(range(first, count + 1))
        new.channel.close()
        engine.close()

    asyncio.run(work())


def test_the_queue_for_an_absent_front_is_bounded(directory: str) -> None:
    async def work() -> None:
        engine = SocketEngineChannel(directory, 1)
        for number in range(MAX_QUEUED + 10):
            engine.send(0, step(number))
        recorder = RecordingFront(SocketFrontChannel(directory, 0))
        await recorder.wait_for(MAX_QUEUED, engine)
        assert recorder.steps == list(range(10, MAX_QUEUED + 10))
        recorder.channel.close()
        engine.close()

    asyncio.run(work())


def test_many_messages_do_not_block_the_event_loop(directory: str, run_loop: RunLoop) -> None:
    async def work() -> None:
        engine = SocketEngineChannel(directory, 1)
        front = SocketFrontChannel(directory, 0)
        front.send(Hello(0))
        await engine_receives(engine, 1)
        for number in range(300):
            engine.send(0, step(number))
        recorder, seen = RecordingFront(front), [0]
        async with asyncio.timeout(LIMIT_S):
            while len(recorder.messages) < 300:
                engine.receive(0.0)
                await asyncio.sleep(0)
                seen.append(len(recorder.messages))
        assert max(later - earlier for earlier, later in zip(seen, seen[1:], strict=False)) <= MAX_MESSAGES_PER_TURN
        assert recorder.steps == list(range(300))
        front.close()
        engine.close()

    run_loop(work())


def test_a_failing_callback_does_not_block_the_next_message(directory: str, run_loop: RunLoop) -> None:
    async def work() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        engine = SocketEngineChannel(directory, 1)
        front = SocketFrontChannel(directory, 0)
        front.send(Hello(0))
        await engine_receives(engine, 1)
        for number in range(5):
            engine.send(0, step(number))
        received: list[int] = []

        def on_message(message: ToFront) -> None:
            assert isinstance(message, StepTokens)
            received.append(message.step_no)
            if message.step_no == 2:
                raise RuntimeError("a defect")

        front.start(asyncio.get_running_loop(), on_message)
        await until(lambda: len(received) == 5)
        assert received == list(range(5))
        front.close()
        engine.close()

    run_loop(work())


def test_a_front_that_sends_a_lot_does_not_starve_the_others(directory: str) -> None:
    engine = SocketEngineChannel(directory, 3)
    flooder, quiet = raw_front(directory, 0), SocketFrontChannel(directory, 2)
    flooder.setblocking(False)
    flood = encode_frame(Abort((0,))) * 1000

    def fill() -> None:
        while True:
            try:
                if flooder.send(flood) < len(flood):
                    return
            except BlockingIOError:
                return

    fill()
    engine.receive(LIMIT_S)
    quiet.send(Abort((9,)))
    assert 9 in ids_of(engine.receive(LIMIT_S) + engine.receive(0.0))
    flooder.close()
    quiet.close()
    engine.close()


@pytest.mark.parametrize("num_fronts", [1, 3])
def test_polling_notices_a_message_and_a_disconnect(directory: str, num_fronts: int) -> None:
    engine = SocketEngineChannel(directory, num_fronts)
    front = SocketFrontChannel(directory, 0)
    threading.Timer(0.05, lambda: front.send(Abort((1,)))).start()
    assert engine.receive(LIMIT_S, poll_s=LIMIT_S) == [Abort((1,))]

    def leave() -> None:
        front.close()
        engine.request_stop()

    threading.Timer(0.05, leave).start()
    assert engine.receive(LIMIT_S, poll_s=LIMIT_S) == [Stop()]
    engine.close()


def test_only_the_owner_can_access_the_socket(directory: str) -> None:
    engine = SocketEngineChannel(directory, 1)
    mode = Path(engine_path(directory)).stat().st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o600
    engine.close()


def test_a_front_with_an_unknown_index_is_rejected(directory: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = SocketEngineChannel(directory, 1)
    with raw_front(directory, 7) as stranger, raw_front(directory, 0) as known:
        known.sendall(encode_frame(Abort((1,))))
        assert engine.receive(LIMIT_S) == [Abort((1,))]
        assert stranger.recv(1) == b""
    assert "index 7" in caplog.text
    engine.close()


def test_the_error_for_a_too_long_path_names_the_remedy() -> None:
    with pytest.raises(ConfigError, match="TMPDIR"):
        SocketFrontChannel("/tmp/" + "x" * 120, 0)
    assert engine_path("/" + "x" * 99).endswith("/engine")


def test_closing_twice_and_stopping_a_closed_channel_are_harmless(directory: str) -> None:
    engine = SocketEngineChannel(directory, 1)
    front = SocketFrontChannel(directory, 0)
    for _ in range(2):
        front.close()
        engine.close()
    engine.request_stop()
    front.send(Stop())
