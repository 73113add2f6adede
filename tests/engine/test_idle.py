"""An engine without work polls for a moment if its device sets `poll_s`, reports that it is idle, then blocks."""

from __future__ import annotations

import pytest
from helpers.fake_channel import FakeChannel
from helpers.fake_clock import FakeClock
from helpers.fake_runner import FakeDevice, FakeRunner, run_engine

from millrace.engine.loop import Engine
from millrace.host import idle_memory
from millrace.link.messages import AbortFront, StepTokens
from millrace.plan.scheduler import Scheduler, SchedulerSettings


@pytest.mark.parametrize("poll_s", [0.0, 0.002])
def test_an_idle_engine_polls_then_reports_then_blocks(poll_s: float) -> None:
    clock = FakeClock(100.0)
    # The first wait of each round ends without a message, the second one with a message that leaves nothing to do.
    channel = FakeChannel([], [AbortFront(0)], [], clock=clock)
    scheduler = Scheduler(SchedulerSettings(num_blocks=8, block_size=4, max_running=2, token_budget=8))
    engine = Engine(scheduler, FakeRunner(), FakeDevice(poll_s), channel, facts=FakeRunner.facts, clock=clock)
    engine.on_idle = lambda: channel.events.append(("idle",))
    run_engine(engine)
    for _, report in channel.sent:
        assert isinstance(report, StepTokens)
        assert report.stats is not None
    polls = [("wait", poll_s, poll_s)] if poll_s else []
    waits = [("wait", idle_memory.IDLE_S, 0.0), ("wait", None, 0.0)]
    found = [event[:1] if event[0] == "send" else event for event in channel.events]
    assert found == [*polls, ("send",), ("idle",), *waits] * 2
