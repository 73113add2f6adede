"""The watchdog logs a stalled step once, with its plan and the stacks of all threads."""

from __future__ import annotations

import logging
import threading
import time

import numpy as np
import pytest

from millrace.engine.watchdog import Watchdog
from millrace.plan.request import Request
from millrace.plan.scheduler import Scheduler


def test_a_stalled_step_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = Scheduler(num_blocks=8, block_size=4, max_running=2, token_budget=16)
    scheduler.submit(Request(id=1, prompt=np.arange(6, dtype=np.int32), max_tokens=2))
    plan = scheduler.plan(0.0)
    assert plan is not None
    launched_at = time.monotonic()
    watchdog = Watchdog(lambda: (plan, launched_at), stall_s=0.1, check_every_s=0.05)
    with caplog.at_level(logging.ERROR, logger="millrace.engine.watchdog"):
        watchdog.start()
        time.sleep(0.5)
        watchdog.stop()
    logged = [record.getMessage() for record in caplog.records]
    assert len(logged) == 1
    assert "1 rows, 6 tokens" in logged[0]


def test_a_step_in_time_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    watchdog = Watchdog(lambda: None, stall_s=0.05, check_every_s=0.02)
    watchdog.start()
    time.sleep(0.2)
    watchdog.stop()
    assert not caplog.records


def test_a_hanging_step_ends_the_engine() -> None:
    scheduler = Scheduler(num_blocks=8, block_size=4, max_running=2, token_budget=16)
    scheduler.submit(Request(id=1, prompt=np.arange(6, dtype=np.int32), max_tokens=2))
    plan = scheduler.plan(0.0)
    assert plan is not None
    given_up = threading.Event()
    watchdog = Watchdog(
        lambda: (plan, time.monotonic() - 10.0),
        stall_s=1000.0,
        check_every_s=0.01,
        hang_s=5.0,
        on_hang=given_up.set,
    )
    watchdog.start()
    assert given_up.wait(5)
    watchdog.stop()
