"""The pool's own checks notice what they are for."""

from __future__ import annotations

import pytest

from millrace.plan.block_pool import BlockPool


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
