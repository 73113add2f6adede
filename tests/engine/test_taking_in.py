"""In a burst the first step is launched before all requests are taken in, and none is lost or overtaken."""

from __future__ import annotations

import numpy as np
from helpers.fake_channel import FakeChannel
from helpers.fake_clock import FakeClock
from helpers.fake_runner import FakeDevice, FakeRunner, run_engine

from millrace.engine.loop import TAKE_IN_S, Engine
from millrace.link.messages import Abort, NewRequest, pack_tokens
from millrace.params.sampling import SamplingParams
from millrace.plan.scheduler import Scheduler, SchedulerSettings
from millrace.plan.step import StepPlan

NUM_REQUESTS = 64


class SlowClock(FakeClock):
    """Every look at it takes time, so that taking in a request does."""

    def __call__(self) -> float:
        self.now += TAKE_IN_S / 20
        return self.now


class Noted(FakeRunner):
    def __init__(self) -> None:
        super().__init__()
        self.admitted: list[list[int]] = []

    def forward(self, plan: StepPlan, given: tuple[np.ndarray, ...] | None = None) -> None:
        self.admitted.append([one.request_id for one in plan.admitted])
        super().forward(plan, given)


def test_the_device_begins_with_the_first_requests_of_a_burst() -> None:
    clock, runner = SlowClock(100.0), Noted()
    params = SamplingParams(max_tokens=3, seed=1)
    burst = [
        NewRequest(id=number, prompt=pack_tokens(range(number, number + 5)), params=params, arrival=100.0)
        for number in range(NUM_REQUESTS)
    ]
    last = NUM_REQUESTS - 1
    channel = FakeChannel([*burst, Abort(ids=(last,))], clock=clock)
    settings = SchedulerSettings(num_blocks=400, block_size=4, max_running=NUM_REQUESTS, token_budget=1024)
    run_engine(Engine(Scheduler(settings), runner, FakeDevice(), channel, facts=FakeRunner.facts, clock=clock))
    assert 1 <= len(runner.admitted[0]) <= 20, "the first step waits for a bounded time"
    admitted = [one for step in runner.admitted for one in sorted(step)]
    assert admitted[:last] == list(range(last)), "in the order of arrival"
    assert all(len(channel.tokens[number]) == 3 for number in range(last))
    assert len(channel.tokens.get(last, [])) < 3, "what comes later in the channel is handled later"
