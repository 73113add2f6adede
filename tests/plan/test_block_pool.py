"""The pool's own checks detect a broken equation; `take_many` returns the same blocks at once as one by one."""

from __future__ import annotations

import pytest

from millrace.plan.kv.block_pool import BlockPool


def test_check_sums_detects_a_broken_equation() -> None:
    pool = BlockPool(8)
    blocks = pool.take_many(5)
    pool.check_sums()
    pool.release(blocks[:2], None)
    pool.release(blocks[2:3], fence=7)
    pool.check_sums()
    pool.release(blocks[3:], None)
    pool.complete(7)
    pool.check_sums()
    pool._refs[blocks[0]] = 1  # Referenced and free at the same time.
    with pytest.raises(AssertionError, match="pool equation"):
        pool.check_sums()


@pytest.mark.parametrize("count", [0, 1, 4, 5, 7, 8])
def test_take_many_takes_the_same_blocks_at_once_as_one_by_one(count: int) -> None:
    """Free blocks first, in their order, then cached blocks, oldest first."""
    pools = [BlockPool(10), BlockPool(10)]
    for pool in pools:
        held = pool.take_many(10)
        for block in held[:4]:
            pool.register([block], [bytes([block])], [b"tokens"], [b""])
        pool.release(held[:8], None)
    one_by_one = [pools[0].take_many(1)[0] for _ in range(count)]
    assert pools[1].take_many(count) == one_by_one
    for pool in pools:
        pool.check()
        assert pool.num_in_use == 2 + count
