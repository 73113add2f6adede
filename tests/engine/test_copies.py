"""Copies of KV blocks in the engine: acknowledged once, failures told to the scheduler, no wait without a bound."""

from __future__ import annotations

import time

import numpy as np

from millrace.engine.copies import MAX_WAIT_S, BlockCopying
from millrace.plan.step import BlockCopies

IDS = np.zeros(1, np.int32)


class FakeScheduler:
    def __init__(self, num_copies: int) -> None:
        self.wanted = [BlockCopies(number, True, IDS, IDS) for number in range(num_copies)]
        self.ended: list[tuple[int, bool, float]] = []

    def take_copies(self) -> list[BlockCopies]:
        wanted, self.wanted = self.wanted, []
        return wanted

    def copies_done(self, copies: BlockCopies, failed: bool, seconds: float = 0.0) -> None:
        self.ended.append((copies.copies_no, failed, seconds))


class FakePending:
    def __init__(self, number: int) -> None:
        self.number, self.is_done = number, False

    def done(self) -> bool:
        return self.is_done

    def wait(self) -> float:
        assert self.is_done, "nothing waits without a bound"
        if self.number == 1:
            raise RuntimeError("a copy failed")
        return 0.5


class FakeRunner:
    def __init__(self) -> None:
        self.started: dict[int, FakePending] = {}

    def copy(self, copies: BlockCopies) -> FakePending:
        if copies.copies_no == 3:
            raise RuntimeError("a copy could not be started")
        self.started[copies.copies_no] = FakePending(copies.copies_no)
        return self.started[copies.copies_no]


def test_copies_are_acknowledged_when_done() -> None:
    scheduler, runner = FakeScheduler(4), FakeRunner()
    copying = BlockCopying(scheduler, runner, time.monotonic)  # type: ignore[arg-type]
    copying.start()
    assert scheduler.ended == [(3, True, 0.0)]
    copying.acknowledge()
    assert len(copying) == 3
    runner.started[0].is_done = runner.started[1].is_done = True
    copying.acknowledge()
    assert scheduler.ended[1:] == [(0, False, 0.5), (1, True, 0.0)]
    assert len(copying) == 1


def test_a_copy_that_never_ends_is_waited_for_briefly() -> None:
    copying = BlockCopying(FakeScheduler(1), FakeRunner(), time.monotonic)  # type: ignore[arg-type]
    copying.start()
    began = time.monotonic()
    copying.acknowledge(wait=True)
    assert MAX_WAIT_S <= time.monotonic() - began < 5.0
    assert len(copying) == 1
