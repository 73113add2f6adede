"""The shared prefix of a decode step, and long steps while many requests wait for their first token."""

from __future__ import annotations

import random

import numpy as np
import pytest
from helpers.toy_device import ToyDevice

from millrace.plan.budget import MANY_PREFILLS
from millrace.plan.kv.groups import KvGroups
from millrace.plan.request import Request
from millrace.plan.scheduler import Scheduler, SchedulerSettings


def request(request_id: int, prompt: list[int], max_tokens: int) -> Request:
    return Request(id=request_id, prompt=np.asarray(prompt, np.int32), max_tokens=max_tokens)


def common_blocks(scheduler: Scheduler, rows: list[int], group: int = 0) -> int:
    held = [scheduler.rows.blocks[row][group] for row in rows]
    count = 0
    for column in zip(*held, strict=False):
        if len(set(column)) > 1:
            break
        count += 1
    return count


@pytest.mark.parametrize("windows", [(None,), (None, None, 9)])
def test_every_row_of_a_step_begins_with_the_shared_blocks(windows: tuple[int | None, ...]) -> None:
    """In every group without a window."""
    num_blocks, groups = 150 * len(windows), KvGroups(windows)
    draw = random.Random(3)
    prefixes = [draw.choices(range(50), k=40), draw.choices(range(50), k=23), []]
    num_shared = 0
    for round_no in range(30):
        sizes = {"num_blocks": num_blocks, "block_size": 4, "max_running": 6, "token_budget": 64}
        scheduler = Scheduler(SchedulerSettings(**sizes, groups=groups))
        device = ToyDevice(num_blocks, 4, 6, 7, windows=windows)
        usual = draw.choice(prefixes)
        for index in range(8):
            prefix = usual if draw.random() < 0.9 else draw.choice(prefixes)
            scheduler.submit(request(index, prefix + draw.choices(range(50), k=draw.randint(1, 9)), draw.randint(1, 9)))
        for step in range(500):
            plan = scheduler.plan(float(step))
            if plan is None:
                break
            for group in range(groups.num_full):
                assert plan.shared_blocks <= common_blocks(scheduler, plan.rows.tolist(), group), round_no
            assert plan.shared_blocks == 0 or plan.counts.max() == 1
            num_shared += plan.shared_blocks > 0
            scheduler.apply(plan.step_no, *device.run(plan))
    assert num_shared > 50


def test_many_waiting_requests_get_long_steps() -> None:
    """Few streams do not delay many waiting requests; few new requests do not disturb many streams."""

    def second_step(num_streams: int, num_new: int) -> int:
        scheduler = Scheduler(
            SchedulerSettings(num_blocks=4000, block_size=4, max_running=128, token_budget=256, mixed_budget=32)
        )
        device = ToyDevice(4000, 4, 128, 7)
        for index in range(num_streams):
            scheduler.submit(request(index, [index, 1], 40))
        plan = scheduler.plan(0.0)
        assert plan is not None
        scheduler.apply(plan.step_no, *device.run(plan))
        for index in range(num_new):
            scheduler.submit(request(100 + index, list(range(index, index + 30)), 4))
        plan = scheduler.plan(1.0)
        assert plan is not None
        return plan.num_tokens

    assert second_step(num_streams=4, num_new=MANY_PREFILLS) > 200
    assert second_step(num_streams=4, num_new=MANY_PREFILLS - 1) <= 32
    assert second_step(num_streams=72, num_new=MANY_PREFILLS) <= 80
