"""The channel over Unix sockets: fronts that connect late, never, or disconnect do not delay the others."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from helpers.waiting import LIMIT_S, until
from helpers.watched_epoll import WatchedEpoll

from millrace.link import engine_end
from millrace.link.engine_end import SocketEngineChannel
from millrace.link.front_end import SocketFrontChannel
from millrace.link.messages import Abort, Hello, StepTokens, Stop, ToEngine, ToFront

pytestmark = pytest.mark.live


@pytest.fixture
def directory() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="mr-") as path:
        yield path


def step(number: int) -> StepTokens:
    return StepTokens(step_no=number, ids=b"", tokens=b"")


def stop_soon(engine: SocketEngineChannel) -> None:
    threading.Thread(target=engine.request_stop).start()


async def exchanged(
    channel: SocketFrontChannel, engine: SocketEngineChannel, steps: int, messages: int
) -> tuple[list[int], list[ToEngine]]:
    """Numbers of the steps that reach the front, and the messages that reach the engine, until there are so many."""
    got: list[ToFront] = []
    taken: list[ToEngine] = []
    channel.start(asyncio.get_running_loop(), got.append)

    def is_done() -> bool:
        taken.extend(engine.receive(0.0))
        return len(got) >= steps and len(taken) >= messages

    await until(is_done)
    channel.close()
    return [message.step_no for message in got if isinstance(message, StepTokens)], taken


def test_an_absent_front_delays_no_other_and_a_late_one_misses_nothing(
    directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_end, "CLOSE_GRACE_S", 0.01)  # For the front that never connects.
    engine = SocketEngineChannel(directory, 3)
    for number in range(100):
        if number % 2:
            engine.send_all(step(number))
            continue
        for front in range(3):
            engine.send(front, step(number))

    async def work() -> None:
        early = SocketFrontChannel(directory, 0)
        assert await exchanged(early, engine, 100, 0) == (list(range(100)), [])
        late = SocketFrontChannel(directory, 1)
        late.send(Hello(1))
        assert await exchanged(late, engine, 100, 1) == (list(range(100)), [Hello(1)])

    asyncio.run(work())
    engine.close()


def test_many_messages_arrive_in_order(directory: str) -> None:
    engine = SocketEngineChannel(directory, 1)

    async def work() -> None:
        front = SocketFrontChannel(directory, 0)
        for number in range(500):
            front.send(Abort((number,)))
            engine.send(0, step(number))
        steps, taken = await exchanged(front, engine, 500, 500)
        assert steps == list(range(500))
        assert taken == [Abort((number,)) for number in range(500)]

    asyncio.run(work())
    engine.close()


def test_idle_is_a_blocking_wait_that_other_threads_can_end(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    epoll = WatchedEpoll.install(monkeypatch)
    engine = SocketEngineChannel(directory, 1)
    epoll.on_block = lambda: stop_soon(engine)
    assert engine.receive(None) == [Stop()]
    assert epoll.timeouts == [0.0, None]
    assert engine.receive(0.0) == []
    assert epoll.timeouts == [0.0, None, 0.0]
    epoll.on_block = lambda: None
    began = time.monotonic()
    assert engine.receive(0.05) == []
    assert time.monotonic() - began >= 0.05
    engine.close()


def test_an_engine_that_watches_polls_and_then_blocks(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    epoll = WatchedEpoll.install(monkeypatch)
    ticks = itertools.count()
    monkeypatch.setattr(engine_end, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    engine = SocketEngineChannel(directory, 1)
    epoll.on_block = lambda: stop_soon(engine)
    assert engine.receive(LIMIT_S, poll_s=10.0) == [Stop()]
    assert epoll.timeouts == [0.0] * 10 + [LIMIT_S - 11], "one look at once, then one at each second before the tenth"
    engine.close()
