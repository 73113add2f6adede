"""The watchdog logs a stalled step once, with its plan and the stacks of all threads."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import pytest
from helpers.fake_clock import FakeClock
from helpers.served import wait_until

from millrace.engine.watchdog import HANG_S, STALL_S, Watchdog
from millrace.plan.request import Request
from millrace.plan.scheduler import Scheduler, SchedulerSettings
from millrace.plan.step import StepPlan


@pytest.fixture
def plan() -> StepPlan:
    scheduler = Scheduler(SchedulerSettings(num_blocks=8, block_size=4, max_running=2, token_budget=16))
    scheduler.submit(Request(id=1, prompt=np.arange(6, dtype=np.int32), max_tokens=2))
    plan = scheduler.plan(0.0)
    assert plan is not None
    return plan


def watch(plan: StepPlan | None, running_s: float, on_hang: Callable[[], None] | None = None) -> None:
    """Let a watchdog look several times at a step that has been running for so long."""
    num_looks = 0

    def oldest() -> tuple[StepPlan, float] | None:
        nonlocal num_looks
        num_looks += 1
        return None if plan is None else (plan, 100.0)

    watchdog = Watchdog(oldest, check_every_s=0.001, on_hang=on_hang, clock=FakeClock(100.0 + running_s))
    watchdog.start()
    wait_until(lambda: num_looks > 3, "looks of the watchdog")
    watchdog.stop()


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.ERROR, logger="millrace.engine.watchdog")
    return lambda: [record.getMessage() for record in caplog.records]


def test_a_stalled_step_is_logged_once(plan: StepPlan, logged: Callable[[], list[str]]) -> None:
    hung: list[bool] = []
    watch(plan, STALL_S, lambda: hung.append(True))
    (message,) = logged()
    assert "1 rows, 6 tokens" in message
    assert not hung


def test_a_step_in_time_is_not_logged(plan: StepPlan, logged: Callable[[], list[str]]) -> None:
    watch(plan, STALL_S - 1.0)
    watch(None, STALL_S)
    assert not logged()


def test_a_hanging_step_ends_the_engine(plan: StepPlan, logged: Callable[[], list[str]]) -> None:
    hung: list[bool] = []
    watch(plan, HANG_S, lambda: hung.append(True))
    assert hung
    assert "the engine exits" in logged()[0]
