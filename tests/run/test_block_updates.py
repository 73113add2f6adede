"""A plan may have any number of block-table updates: those that a packet cannot hold are sent before it."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.plan_contents import contents

from millrace.plan.step import StepPlan, exact_shape
from millrace.run.device.device import CpuDevice
from millrace.run.packet.step_packet import PacketWriter
from millrace.run.shapes.table import ShapeFacts, ShapeTable
from millrace.run.table.request_table import RequestTable

ROWS, COLUMNS, GROUPS = 4, 8, 2
CASES = [(0, 4, 0), (4, 4, 0), (5, 4, 1), (30, 4, 26), (3, 0, 3)]


def plan_of(num_updates: int, has_groups: bool) -> StepPlan:
    rng, one = np.random.default_rng(num_updates), np.ones(1, np.int32)
    at = rng.permutation(ROWS * COLUMNS)[:num_updates].astype(np.int32)
    return StepPlan(
        step_no=0, rows=0 * one, starts=0 * one, counts=one, samples=one > 0,
        block_rows=at // COLUMNS, block_cols=at % COLUMNS,
        block_ids=rng.integers(1, 99, num_updates).astype(np.int32),
        block_groups=rng.integers(0, GROUPS, num_updates).astype(np.int32) if has_groups else None,
        shape=exact_shape(one),
    )  # fmt: skip


@pytest.mark.parametrize("has_groups", [False, True])
@pytest.mark.parametrize(("num_updates", "limit", "num_sent"), CASES)
def test_every_update_is_sent_once(num_updates: int, limit: int, num_sent: int, has_groups: bool) -> None:
    device, plan = CpuDevice(1), plan_of(num_updates, has_groups)
    before = contents(plan)
    expected, table = (RequestTable(device, max_rows=ROWS, max_blocks=COLUMNS, num_groups=GROUPS) for _ in range(2))
    expected.update(plan)
    assert table.send_excess_blocks(plan, limit) == num_sent
    writer = PacketWriter(ShapeTable(ShapeFacts(ROWS, 64, 8, 4)))
    layout, packet = writer.layout(plan.shape), np.full(4096, 777, np.int32)
    used = writer.write(plan, table, plan.shape, packet, num_sent=num_sent)
    count = int(packet[layout.num_updates.start])
    assert count == num_updates - num_sent
    assert used == layout.updates_start + 3 * count
    tables = table.block_tables.flatten(0, 1)
    for row, column, block in packet[layout.updates_start : used].reshape(-1, 3).tolist():
        tables[row, column] = block
    assert table.block_tables.equal(expected.block_tables)
    assert contents(plan) == before
