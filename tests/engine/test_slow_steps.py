"""How many steps are in flight, by how long they take."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from helpers.fake_runner import step_result

from millrace.engine.cycle import Confirmed, Cycle
from millrace.plan.request import BATCH, INTERACTIVE, Request
from millrace.plan.scheduler import Scheduler, SchedulerSettings
from millrace.plan.step import Ended, StepPlan
from millrace.run.facts import RunnerFacts
from millrace.run.protocol import StepResult


@dataclass
class Device:
    """Runs steps on a simulated clock; a step begins when the one before has ended."""

    step_s: float
    now: float = 0.0
    first_token_at: dict[int, float] = field(default_factory=dict)
    admitted: list[list[int]] = field(default_factory=list)
    free_at: float = 0.0

    def forward(self, plan: StepPlan, given: None = None) -> None:
        self.admitted.append([admission.request_id for admission in plan.admitted])

    def draw(self, plan: StepPlan, inputs: None = None) -> Pending:
        self.free_at = max(self.free_at, self.now) + self.step_s
        return Pending(self, plan, self.free_at)

    def on_launched(self, plan: StepPlan, now: float) -> None: ...

    def on_tokens(self, done: Confirmed) -> None:
        self.first_token_at.update(dict.fromkeys(done.outcome.first_ids.tolist(), self.now))

    def on_step_done(self, done: Confirmed) -> None: ...

    def on_ended(self, ended: tuple[Ended, ...], now: float) -> None: ...


@dataclass
class Pending:
    device: Device
    plan: StepPlan
    ends_at: float

    def wait(self) -> StepResult:
        self.device.now = max(self.device.now, self.ends_at)
        tokens = np.full(int(self.plan.samples.sum()), 5, np.int32)
        return step_result(self.plan, tokens)

    def done(self) -> bool:
        return True


def request(number: int, priority: int, now: float) -> Request:
    return Request(number, np.arange(8 * number, 8 * number + 8), max_tokens=64, priority=priority, arrival=now)


@pytest.mark.parametrize(("step_s", "num_in_flight", "num_steps"), [(0.01, 2, 3), (0.2, 1, 1)])
def test_long_steps_are_planned_late_so_that_urgent_requests_wait_less(
    step_s: float, num_in_flight: int, num_steps: int
) -> None:
    scheduler = Scheduler(SchedulerSettings(num_blocks=64, block_size=16, max_running=2, token_budget=64))
    device = Device(step_s)
    cycle = Cycle(
        *(scheduler, device, device),  # type: ignore[arg-type]
        facts=RunnerFacts(slow_step_s=0.05),
        clock=lambda: device.now,
        probe=lambda: None,
    )
    for number in (1, 2):
        scheduler.submit(request(number, BATCH, 0.0))
    for _ in range(6):
        cycle.advance()
    cycle.advance()
    # Rows are full and steps run. A batch row gives way to the interactive request.
    arrival = device.now
    scheduler.submit(request(3, INTERACTIVE, arrival))
    assert scheduler.num_in_flight == num_in_flight - 1
    while 3 not in device.first_token_at:
        cycle.advance()
    assert round((device.first_token_at[3] - arrival) / step_s) == num_steps
