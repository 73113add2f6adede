"""Copies of KV blocks in the engine: acknowledged once, failures told to the scheduler, no wait without a bound."""

from __future__ import annotations

import time

import numpy as np
import pytest
from helpers.fake_clock import FakeClock
from helpers.fake_runner import FakeRunner

from millrace.engine.copies import MAX_WAIT_S, BlockCopying
from millrace.plan.step import BlockCopies

IDS = np.zeros(1, np.int32)


class FakeScheduler:
    def __init__(self, num_copies: int) -> None:
        self.wanted = [BlockCopies(number, "device", "host", IDS, IDS) for number in range(num_copies)]
        self.ended: list[tuple[int, bool, float]] = []

    def take_copies(self) -> list[BlockCopies]:
        wanted, self.wanted = self.wanted, []
        return wanted

    def copies_done(self, copies: BlockCopies, failed: bool, seconds: float = 0.0) -> None:
        self.ended.append((copies.copies_no, failed, seconds))


def test_copies_are_acknowledged_when_done() -> None:
    scheduler, runner = FakeScheduler(4), FakeRunner()
    runner.refused_copies = {3}
    copying = BlockCopying(scheduler, runner, FakeClock(), time.sleep)  # type: ignore[arg-type]
    copying.start()
    assert scheduler.ended == [(3, True, 0.0)]
    copying.acknowledge()
    assert len(copying) == 3
    runner.copies[0].is_done = runner.copies[1].is_done = True
    runner.copies[1].error = RuntimeError("a copy failed")
    copying.acknowledge()
    assert scheduler.ended[1:] == [(0, False, 0.5), (1, True, 0.0)]
    assert len(copying) == 1


def test_a_copy_that_never_ends_is_waited_for_briefly() -> None:
    looks = 0

    def clock() -> float:
        """A tenth of the longest wait passes between two looks."""
        nonlocal looks
        looks += 1
        return looks * MAX_WAIT_S / 10

    copying = BlockCopying(FakeScheduler(1), FakeRunner(), clock, lambda _: None)  # type: ignore[arg-type]
    copying.start()
    copying.acknowledge(wait=True)
    assert 10 <= looks <= 12
    assert len(copying) == 1


@pytest.mark.timeout(60)
def test_the_wait_ends_on_a_clock_that_stands_still() -> None:
    copying = BlockCopying(FakeScheduler(1), FakeRunner(), lambda: 0.0, lambda _: None)  # type: ignore[arg-type]
    copying.start()
    copying.acknowledge(wait=True)
    assert len(copying) == 1


def test_a_wait_passes_time_of_the_given_clock_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(seconds: float) -> None:
        raise AssertionError(f"slept {seconds} s on the real clock")

    monkeypatch.setattr(time, "sleep", refuse)
    clock, scheduler, runner = FakeClock(), FakeScheduler(1), FakeRunner()

    def pass_time(seconds: float) -> None:
        clock.now += seconds
        runner.copies[0].is_done = clock.now >= MAX_WAIT_S / 2

    copying = BlockCopying(scheduler, runner, clock, pass_time)  # type: ignore[arg-type]
    copying.start()
    copying.acknowledge(wait=True)
    assert scheduler.ended == [(0, False, 0.5)]
    assert MAX_WAIT_S / 2 <= clock.now < MAX_WAIT_S
