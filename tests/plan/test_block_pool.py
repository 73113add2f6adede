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
            pool.named.register([block], [bytes([block])], [b"tokens"], b"")
        pool.release(held[:8], None)
    one_by_one = [pools[0].take_many(1)[0] for _ in range(count)]
    assert pools[1].take_many(count) == one_by_one
    for pool in pools:
        pool.check()
        assert pool.num_in_use == 2 + count


def test_children_are_found_by_their_parent() -> None:
    pool = BlockPool(4)
    first, second, other = pool.take_many(3)
    pool.named.register([first, second], [b"h1", b"h2"], [b"t1", b"t2"], b"root")
    pool.named.register([other], [b"o1"], [b"t1"], b"other root")
    assert pool.named.find_child(0, b"root", b"t1") == (first, b"h1")
    assert pool.named.find_child(0, b"other root", b"t1") == (other, b"o1"), "equal tokens after another root"
    assert pool.named.find_child(first, b"h1", b"t2") == (second, b"h2")
    assert pool.named.find_child(first, b"h1", b"t1") is None
    assert pool.named.find_child(other, b"o1", b"t2") is None
    assert pool.named.tokens_of_children(0, b"no root", 9) == []


def test_all_children_are_found_until_they_are_evicted() -> None:
    pool = BlockPool(4)
    blocks, tokens = pool.take_many(4), [b"tok%d" % number for number in range(4)]
    for number, block in enumerate(blocks):
        pool.named.register([block], [b"h%d" % number], [tokens[number]], b"root")

    def found(most: int = 9) -> list[int]:
        return [tokens.index(one) for one in pool.named.tokens_of_children(0, b"root", most)]

    assert found() == [3, 2, 1, 0]
    assert found(most=2) == [3, 2]
    for evicted, left in ((1, [3, 2, 0]), (3, [2, 0]), (0, [2]), (2, [])):
        pool.release([blocks[evicted]], None)
        assert pool.take_many(1) == [blocks[evicted]]
        assert found() == left


def test_evicted_blocks_are_no_children() -> None:
    pool = BlockPool(3)
    first, older, newer = pool.take_many(3)
    pool.named.register([first, older], [b"h1", b"h2"], [b"t1", b"t2"], b"root")
    pool.named.register([newer], [b"h3"], [b"t3"], b"h1")
    pool.release([older], None)
    assert pool.take_many(1) == [older], "evicted"
    assert pool.named.find_child(first, b"h1", b"t3") == (newer, b"h3"), "its sibling stays"
    pool.release([first], None)
    assert pool.take_many(1) == [first], "evicted"
    assert pool.named.find_child(0, b"root", b"t1") is None
    pool.named.register([first], [b"h4"], [b"t4"], b"root")
    assert pool.named.find_child(first, b"h4", b"t3") is None, "the child of what the block held before"
    pool.release([newer], None)
    assert pool.take_many(1) == [newer], "evicted"
    pool.named.register([newer], [b"h5"], [b"t5"], b"h4")
    assert pool.named.find_child(first, b"h4", b"t5") == (newer, b"h5")
    pool.check()


def test_a_block_shared_and_released_again_waits_for_its_last_fence() -> None:
    pool = BlockPool(2)
    (block,) = pool.take_many(1)
    pool.named.register([block], [b"h1"], [b"t1"], b"root")
    for fence in (3, 3, 5):
        pool.release([block], fence)
        assert pool.num_fenced == 1
        pool.check()
        if fence < 5:
            pool.share([block])
            assert pool.num_fenced == 0
    pool.complete(3)
    assert (pool.num_fenced, pool.num_cached) == (1, 0)
    pool.complete(5)
    assert (pool.num_fenced, pool.num_cached) == (0, 1)
    pool.check()
