"""Block-table updates since the last plan are returned once, as columns, without updates of released rows."""

from __future__ import annotations

import pytest

from millrace.plan.kv.new_blocks import NewBlocks


def listed(blocks: NewBlocks) -> list[tuple[int, ...]]:
    columns = blocks.take()
    assert all(column.dtype == "int32" for column in columns)
    return list(zip(*(column.tolist() for column in columns), strict=True))


@pytest.mark.parametrize("first", [0, 3, 1020, 5000])
def test_updates_come_out_in_the_order_added(first: int) -> None:
    blocks = NewBlocks(num_groups=2)
    assert listed(blocks) == []
    blocks.add_many(1, 4, first, [9, 8, 7, 6, 5])
    blocks.add_each(0, [2, 3], [11, 12], [30, 31])
    blocks.add_many(0, 3, 0, [])
    expected = [(1, 4, first + place, 9 - place) for place in range(5)]
    assert listed(blocks) == [*expected, (0, 2, 11, 30), (0, 3, 12, 31)]
    assert listed(blocks) == []


def test_taken_columns_do_not_change_later() -> None:
    blocks = NewBlocks(num_groups=2)
    blocks.add_each(0, [1], [2], [3])
    taken = blocks.take()
    blocks.add_many(0, 7, 0, [8, 9])
    assert [column.tolist() for column in taken] == [[0], [1], [2], [3]]
    assert listed(blocks) == [(0, 7, 0, 8), (0, 7, 1, 9)]


def test_updates_of_a_released_row_are_dropped() -> None:
    blocks = NewBlocks(num_groups=2)
    for row in (1, 2, 1, 3):
        blocks.add_many(row % 2, row, 0, [row, 10 + row])
    blocks.drop(1)
    blocks.drop(9)
    assert listed(blocks) == [(0, 2, 0, 2), (0, 2, 1, 12), (1, 3, 0, 3), (1, 3, 1, 13)]
    blocks.add_each(0, [5], [0], [1])
    blocks.clear()
    assert listed(blocks) == []


def test_one_group_is_left_out() -> None:
    blocks = NewBlocks()
    blocks.add_many(0, 7, 0, [8, 9])
    blocks.add_each(0, [1], [2], [3])
    blocks.drop(7)
    assert [column.tolist() for column in blocks.take()] == [[], [1], [2], [3]]
    assert [len(column) for column in blocks.take()] == [0, 0, 0, 0]
