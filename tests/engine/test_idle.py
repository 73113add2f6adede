"""An engine without work polls for a moment if its device sets `poll_s`, reports that it is idle, then blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from millrace.engine.loop import Engine
from millrace.host import idle_memory
from millrace.link.messages import AbortFront, StepTokens, ToEngine, ToFront
from millrace.plan.scheduler import Scheduler


class Channel:
    """Records how the engine waits and what it sends."""

    num_fronts = 1

    def __init__(self) -> None:
        self.waits: list[tuple[float | None, float]] = []
        self.sent: list[ToFront] = []
        self.next: list[ToEngine] = []

    def receive(self, timeout_s: float | None, poll_s: float = 0.0) -> list[ToEngine]:
        self.waits.append((timeout_s, poll_s))
        messages, self.next = self.next, []
        return messages

    def send(self, front_index: int, message: ToFront) -> None:
        self.sent.append(message)

    def send_all(self, message: ToFront) -> None:
        self.sent.append(message)

    def close(self) -> None: ...


@pytest.mark.parametrize("poll_s", [0.0, 0.002])
def test_an_idle_engine_polls_then_reports_then_blocks(poll_s: float) -> None:
    channel = Channel()
    scheduler = Scheduler(num_blocks=8, block_size=4, max_running=2, token_budget=8)
    runner: Any = SimpleNamespace(is_built=True, take_missed=list)
    device: Any = SimpleNamespace(kind="cpu", poll_s=poll_s, probe=None)
    now = 100.0
    engine = Engine(scheduler, runner, device, channel, clock=lambda: now)
    idle_at: list[float] = []
    engine.on_idle = lambda: idle_at.append(now)
    for _ in range(2):
        channel.waits.clear()
        channel.sent.clear()
        engine._take_messages()
        if poll_s:
            assert channel.waits == [(poll_s, poll_s)]
            assert not channel.sent, "nothing is sent while the engine polls"
            engine._take_messages()
        assert channel.waits[-1] == (idle_memory.IDLE_S, 0.0)
        assert [cast(StepTokens, message).stats is not None for message in channel.sent] == [True]
        now += idle_memory.IDLE_S + 1
        engine._take_messages()
        assert channel.waits[-1] == (None, 0.0)
        assert len(channel.sent) == 1
        assert idle_at.pop() == now - idle_memory.IDLE_S - 1
        assert not idle_at
        channel.next = [AbortFront(0)]
        engine._take_messages()
