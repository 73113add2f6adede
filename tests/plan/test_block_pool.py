"""The pool's own checks notice what they are for; blocks taken together are those that would be taken one by one."""

from __future__ import annotations

import pytest

from millrace.plan.kv.block_pool import BlockPool


def test_the_sums_are_checked_without_looking_at_every_block() -> None:
    pool = BlockPool(8)
    blocks = [pool.take() for _ in range(5)]
    pool.check_sums()
    pool.give_back(blocks[:2], None)
    pool.give_back(blocks[2:3], fence=7)
    pool.check_sums()
    pool.give_back(blocks[3:], None)
    pool.complete(7)
    pool.check_sums()
    pool._refs[blocks[0]] = 1  # held, and free at the same time
    with pytest.raises(AssertionError, match="pool equation"):
        pool.check_sums()


@pytest.mark.parametrize("count", [0, 1, 4, 5, 7, 8])
def test_many_blocks_are_taken_as_if_one_by_one(count: int) -> None:
    """From what is free, in its order, and beyond that from what is cached, the oldest first."""
    pools = [BlockPool(10), BlockPool(10)]
    for pool in pools:
        held = [pool.take() for _ in range(10)]
        for block in held[:4]:
            pool.name(block, bytes([block]), b"tokens")
        pool.give_back(held[:8], None)
    one_by_one = [pools[0].take() for _ in range(count)]
    assert pools[1].take_many(count) == one_by_one
    for pool in pools:
        pool.check()
        assert pool.num_in_use == 2 + count
