"""Another rank of a split model begins what rank 0 recorded as soon as it can, and waits for nothing in vain."""

from __future__ import annotations

import numpy as np

from millrace.plan.step import BlockCopies, CapturePlan, StepInputs, StepPlan, exact_shape
from millrace.run.device.device import Pending
from millrace.run.protocol import StepResult
from millrace.run.ranks.rank_follower import RankFollower
from millrace.run.ranks.recorder import DiskWork


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


class Copying:
    is_done = False

    def done(self) -> bool:
        return self.is_done

    def wait(self) -> float:
        return 0.0


class NotedRunner:
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def forward(self, plan: StepPlan, given: tuple[np.ndarray, ...] | None = None) -> None:
        self.asked.append(f"forward {plan.step_no}")

    def draw(self, plan: StepPlan, inputs: StepInputs | None = None) -> Pending[StepResult]:
        self.asked.append(f"draw {plan.step_no}")
        return None  # type: ignore[return-value]

    def copy(self, copies: BlockCopies) -> Pending[float]:
        self.asked.append(f"copy {copies.copies_no}")
        return Copying()

    def capture(self, plan: CapturePlan) -> bool:
        return False


def step(step_no: int, *, masked: bool = False) -> StepPlan:
    none, one = ints(), ints(1)
    return StepPlan(
        *(step_no, ints(0), ints(step_no), one, np.array([True])),
        *(none, none, none, exact_shape(one)),
        masked=np.array([True]) if masked else None,
    )


COPIES = BlockCopies(1, "device", "host", ints(3), ints(0))


def taken(*records: StepPlan | StepInputs | BlockCopies) -> list[str]:
    runner = NotedRunner()
    follower = RankFollower(runner)  # type: ignore[arg-type]
    for record in records:
        follower.take(record)
    return runner.asked


def test_a_draw_waits_for_its_masks_and_what_follows_comes_after_it() -> None:
    assert taken(step(1, masked=True)) == ["forward 1"]
    asked = taken(step(1, masked=True), StepInputs(1), COPIES, step(2))
    assert asked == ["forward 1", "draw 1", "copy 1", "forward 2", "draw 2"]


def test_what_follows_a_step_that_rank_0_never_drew_does_not_wait_for_its_masks() -> None:
    """Rank 0 sends nothing while a step waits for its masks: if something comes, the step before it has failed."""
    asked = taken(step(1, masked=True), COPIES, step(2))
    assert asked == ["forward 1", "copy 1", "forward 2", "draw 2"]


def test_work_on_a_disk_comes_with_the_copies_before_it_that_go_on() -> None:
    runner, given = NotedRunner(), list[int]()
    work = DiskWork(1, "write", [0], [0], (b"name",))
    follower = RankFollower(runner, take_work=lambda _, before: given.append(len(before)))  # type: ignore[arg-type]
    for record in (work, COPIES, work, COPIES, work):
        follower.take(record)
    Copying.is_done = True
    follower.take(COPIES)
    Copying.is_done = False
    follower.take(work)
    assert given == [0, 1, 2, 1]
