"""What a runner's steps leave in records."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers.fake_runner import FakeRunner, FakeStep, step_result

from millrace.plan.step import DrawShape, Masks, StepInputs, StepPlan, exact_shape
from millrace.run.protocol import StepResult
from millrace.run.ranks.follower import Follower
from millrace.run.ranks.recorder import RESULT, LoggedResult, RecordedRunner, RecordReader, RunnerSetup, StepRecorder

SETUP = RunnerSetup(
    *("model", "float32", "none", 0, False, "full", "off"),
    *(8, 4, 4, 32, 32, 0, 1),
)


class Records:
    def __init__(self) -> None:
        self.all: list[tuple[int, bytes]] = []

    def write(self, kind: int, data: bytes) -> None:
        self.all.append((kind, data))


class StepsOf(FakeRunner):
    """Draws each step's number, but fails at one step."""

    def __init__(self, bad_step: int | None = None) -> None:
        super().__init__()
        self.bad_step = bad_step

    def draw(self, plan: StepPlan, inputs: StepInputs | None = None) -> FakeStep:
        def wait() -> StepResult:
            if plan.step_no == self.bad_step:
                raise RuntimeError("bad")
            return step_result(plan, np.array([plan.step_no], np.int32))

        return FakeStep(wait)


def plan_of(step_no: int) -> StepPlan:
    one, none = np.ones(1, np.int32), np.zeros(0, np.int32)
    return StepPlan(step_no, 0 * one, 0 * one, one, one > 0, none, none, none, exact_shape(one))


def test_results_of_steps_behind_one_that_failed_are_not_recorded() -> None:
    """Rank 0 discards them, and announces their rows again."""
    records = Records()
    runner = RecordedRunner(StepsOf(bad_step=2), StepRecorder(records, SETUP))

    def launched(step_no: int) -> FakeStep:
        plan = plan_of(step_no)
        runner.forward(plan)
        drawn = runner.draw(plan)
        return FakeStep(drawn.wait)

    assert launched(1).wait().step_no == 1
    bad, behind = launched(2), launched(3)
    with pytest.raises(RuntimeError, match="bad"):
        bad.wait()
    assert behind.wait().step_no == 3
    assert launched(4).wait().step_no == 4

    reader, follower = RecordReader(), Follower(StepsOf())
    read = [reader.read(kind, data) for kind, data in records.all]
    assert [one.step_no for one in read if isinstance(one, LoggedResult)] == [1, 4]
    assert sum(kind == RESULT for kind, _ in records.all) == 2
    followed = [found for record in read if (found := follower.take(record)) is not None]
    assert [(one.plan.step_no, one.difference()) for one in followed] == [(1, None), (4, None)]


def test_masks_of_a_draw_that_waits_for_them_are_recorded_when_they_are_there() -> None:
    records, device = Records(), FakeRunner(draws_ahead=True)
    runner = RecordedRunner(device, StepRecorder(records, SETUP))
    plan = replace(plan_of(1), masked=np.ones(1, np.bool_), draw=DrawShape(full=1, waits=True))
    runner.forward(plan)
    masks = Masks(np.zeros(1, np.int64), runner.mask_memory(1))
    pending = runner.draw_ahead(plan, StepInputs(1, masks))
    assert pending is not None
    masks.bits[:] = 2**32 - 1
    runner.masks_ready()
    assert pending.wait().step_no == 1
    reader = RecordReader()
    _, read, inputs, result = [reader.read(kind, data) for kind, data in records.all]
    assert isinstance(read, StepPlan)
    assert read.draw == plan.draw
    assert isinstance(inputs, StepInputs)
    assert inputs.masks is not None
    assert inputs.masks.bits.min() == 2**32 - 1
    assert isinstance(result, LoggedResult)

    device.draws_ahead = False
    runner.forward(plan)
    assert runner.draw_ahead(plan, StepInputs(1, masks)) is None
