from __future__ import annotations

import numpy as np

from millrace.plan.request import Request
from millrace.plan.scheduler import Scheduler, SchedulerSettings


def scheduler(*, static: bool) -> Scheduler:
    return Scheduler(
        SchedulerSettings(
            num_blocks=64,
            block_size=4,
            max_running=4,
            token_budget=16,
            mixed_budget=16,
            static_batching=static,
        )
    )


def run(plans: Scheduler, max_tokens: list[int], steps: int) -> list[int]:
    """Number of rows of each step."""
    for number, limit in enumerate(max_tokens):
        plans.submit(Request(id=number, prompt=np.arange(4, dtype=np.int32) + 10 * number, max_tokens=limit))
    found = []
    for _ in range(steps):
        plan = plans.plan(0.0)
        if plan is None:
            break
        found.append(len(plan.rows))
        plans.apply(plan.step_no, np.full(int(plan.samples.sum()), 5, np.int32))
    return found


def test_a_static_batch_waits_for_its_last_request() -> None:
    limits = [1, 6, 1, 1, 2, 2]
    assert run(scheduler(static=True), limits, 20) == [4, 1, 1, 1, 1, 1, 2, 2]
    continuous = run(scheduler(static=False), limits, 20)
    assert len(continuous) == 6
    assert continuous[1] == 3
