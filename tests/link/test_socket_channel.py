"""The channel over Unix sockets: fronts that connect late, never, or disconnect do not delay the others."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections.abc import Iterator

import pytest

from millrace.link.engine_end import SocketEngineChannel
from millrace.link.front_end import SocketFrontChannel
from millrace.link.messages import Abort, Hello, StepTokens, Stop, ToFront


@pytest.fixture
def directory() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="mr-") as path:
        yield path


def step(number: int) -> StepTokens:
    return StepTokens(step_no=number, ids=b"", tokens=b"")


async def received(channel: SocketFrontChannel, count: int) -> list[int]:
    """Numbers of the first `count` steps that arrive."""
    got: list[ToFront] = []
    done = asyncio.Event()

    def on_message(message: ToFront) -> None:
        got.append(message)
        if len(got) >= count:
            done.set()

    channel.start(asyncio.get_running_loop(), on_message)
    await asyncio.wait_for(done.wait(), 10)
    channel.close()
    return [message.step_no for message in got if isinstance(message, StepTokens)]


def test_an_absent_front_delays_no_other_and_a_late_one_misses_nothing(directory: str) -> None:
    engine = SocketEngineChannel(directory, 3)
    began = time.monotonic()
    for number in range(100):
        if number % 2:
            engine.send_all(step(number))
            continue
        for front in range(3):
            engine.send(front, step(number))
    assert time.monotonic() - began < 10.0

    async def work() -> None:
        early = SocketFrontChannel(directory, 0)
        waiting = asyncio.create_task(received(early, 100))
        await asyncio.to_thread(engine.receive, 0.3)
        assert await waiting == list(range(100))
        late = SocketFrontChannel(directory, 1)
        late.send(Hello(1))
        waiting = asyncio.create_task(received(late, 100))
        messages = await asyncio.to_thread(engine.receive, 2.0)
        assert [type(message) for message in messages] == [Hello]
        await asyncio.to_thread(engine.receive, 0.3)
        assert await waiting == list(range(100))

    asyncio.run(work())
    began = time.monotonic()
    engine.close()
    assert time.monotonic() - began < 15.0


def test_idle_is_a_blocking_wait_that_other_threads_can_end(directory: str) -> None:
    engine = SocketEngineChannel(directory, 1)
    threading.Timer(0.2, engine.request_stop).start()
    used = time.process_time()
    assert engine.receive(None) == [Stop()]
    assert time.process_time() - used < 0.1
    assert engine.receive(0.0) == []
    began = time.monotonic()
    assert engine.receive(0.1) == []
    assert 0.08 < time.monotonic() - began < 10.0
    engine.close()


def test_many_messages_arrive_in_order(directory: str) -> None:
    engine = SocketEngineChannel(directory, 1)

    async def work() -> None:
        front = SocketFrontChannel(directory, 0)
        for number in range(500):
            front.send(Abort((number,)))
            engine.send(0, step(number))
        arriving = asyncio.ensure_future(received(front, 500))
        taken: list[int] = []
        end = time.monotonic() + 10
        while time.monotonic() < end and (len(taken) < 500 or not arriving.done()):
            taken += [message.ids[0] for message in engine.receive(0.0) if isinstance(message, Abort)]
            await asyncio.sleep(0.001)
        assert taken == list(range(500))
        assert await arriving == list(range(500))

    asyncio.run(work())
    engine.close()


def test_an_engine_that_watches_polls_and_then_blocks(directory: str) -> None:
    engine = SocketEngineChannel(directory, 1)
    used, began = time.process_time(), time.monotonic()
    assert engine.receive(0.4, poll_s=0.1) == []
    assert 0.38 < time.monotonic() - began < 10.0
    assert time.process_time() - used < 0.3
    engine.close()
