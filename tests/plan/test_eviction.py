"""Policies of eviction: what each evicts first, and that a block goes before the one that it follows."""

from __future__ import annotations

import random
from array import array

import pytest
from helpers.suite import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.config import EvictionName
from millrace.plan.kv.block_hash import block_hash
from millrace.plan.kv.block_pool import BlockPool
from millrace.plan.kv.eviction import MIN_STALE, BlockRecords, EvictionSettings, RankedBlocks, by_cost, by_frequency

POLICIES: tuple[EvictionName, ...] = ("lru", "frequency", "cost")


class Cache:
    """Sequences of letters in a pool with blocks of one letter."""

    def __init__(self, policy: EvictionName, num_blocks: int, column_cost: float = 0.0) -> None:
        self.pool = BlockPool(num_blocks, eviction=EvictionSettings(policy, column_cost))

    def names(self, text: str) -> list[bytes]:
        names, parent = [], b"root"
        for letter in text:
            parent = block_hash(parent, letter.encode())
            names.append(parent)
        return names

    def found(self, text: str) -> list[int]:
        blocks = []
        for name, letter in zip(self.names(text), text, strict=True):
            block = self.pool.named.find(name, letter.encode())
            if block is None:
                break
            blocks.append(block)
        return blocks

    def begin(self, text: str) -> list[int]:
        found, names = self.found(text), self.names(text)
        self.pool.share(found)
        first = len(found)
        row = found + self.pool.take_many(len(text) - first)
        parent = names[first - 1] if first else b"root"
        self.pool.named.register(row[first:], names[first:], [letter.encode() for letter in text[first:]], parent)
        return row

    def use(self, text: str) -> int:
        """Returns how much of the text was found."""
        num_found = len(self.found(text))
        self.pool.release(reversed(self.begin(text)), None)
        self.pool.check()
        return num_found


def test_the_least_recently_used_goes_first() -> None:
    cache = Cache("lru", 6)
    for text in ("aa", "bb", "cc", "aa", "dd"):
        cache.use(text)
    assert [len(cache.found(text)) for text in ("aa", "bb", "cc", "dd")] == [2, 0, 2, 2]


def test_what_is_used_often_survives_a_scan() -> None:
    scans = [2 * chr(ord("d") + number) for number in range(4)]
    left = {}
    for policy in POLICIES:
        cache = Cache(policy, 6)
        for text in ("aa", "aa", "aa", "aa", *scans):
            cache.use(text)
        left[policy] = len(cache.found("aa"))
    assert left == {"lru": 0, "frequency": 2, "cost": 2}


def test_old_fame_fades() -> None:
    cache = Cache("frequency", 4)
    for _ in range(5):
        cache.use("aa")
    num_scans = 0
    while cache.found("aa"):
        cache.use(2 * chr(ord("b") + num_scans))
        num_scans += 1
    assert 2 < num_scans < 12


def test_what_is_dear_to_compute_stays() -> None:
    """Late blocks attend to more tokens before them."""
    short_and_long = {}
    for policy in ("frequency", "cost"):
        cache = Cache(policy, 9, column_cost=1.0)
        for text in ("abcdef", "x", "y", "z", "uv"):
            cache.use(text)
        short_and_long[policy] = len(cache.found("abcdef")), sum(bool(cache.found(text)) for text in "xyz")
    assert short_and_long["cost"] == (6, 1)
    assert short_and_long["frequency"][0] < 6


@pytest.mark.parametrize("policy", POLICIES)
def test_a_block_goes_before_the_one_that_it_follows(policy: EvictionName) -> None:
    cache = Cache(policy, 8, column_cost=5.0)
    cache.use("abcdefgh")
    for left in range(7, 0, -1):
        cache.pool.release(cache.pool.take_many(1), None)
        cache.pool.take_many(1)
        assert len(cache.found("abcdefgh")) == left


def test_a_block_whose_successor_is_in_use_can_be_evicted_if_nothing_else_is_left() -> None:
    cache = Cache("frequency", 3)
    first = cache.begin("a")
    second = cache.pool.take_many(2)  # Another request computes "ab" at the same time: its "a" is no longer registered.
    cache.pool.named.register(second[1:], cache.names("ab")[1:], [b"b"], cache.names("a")[0])
    cache.pool.release(first, None)
    assert cache.pool.num_available == 1
    assert cache.pool.take_many(1) == first
    cache.pool.release([second[1], first[0], second[0]], None)
    cache.pool.check()


def test_removed_entries_do_not_pile_up() -> None:
    records = BlockRecords(array("i", [1] * 9))
    order = RankedBlocks(by_frequency, records)
    for block in range(1, 9):
        records.begin(block, 0)
        order.add(block)
    for _ in range(1000):
        order.remove(3)
        order.add(3)
    assert len(order._heap) <= 2 * len(order) + MIN_STALE + 1
    assert [order.take_first() for _ in range(8)] == [1, 2, 4, 5, 6, 7, 8, 3]


@settings(max_examples=examples(20), deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(POLICIES))
def test_ranked_orders_agree_with_a_plain_search(seed: int, policy: EvictionName) -> None:
    """At each eviction nothing that could go has a lower rank."""
    rng = random.Random(seed)
    worth = by_cost(0.3) if policy == "cost" else by_frequency
    records = BlockRecords(array("i", bytes(4 * 21)))
    order = RankedBlocks(worth, records)
    ranks: dict[int, tuple[float, int]] = {}
    age, number = 0.0, 0
    for _ in range(120):
        outside = [block for block in range(1, 21) if block not in order]
        if outside and rng.random() < 0.6:
            block = rng.choice(outside)
            records.begin(block, 0)
            records.uses[block], records.columns[block] = rng.randrange(1, 5), rng.randrange(6)
            order.add(block)
            ranks[block] = age + worth(records.uses[block], records.columns[block]), number
            number += 1
        elif ranks and rng.random() < 0.4:
            block = rng.choice(sorted(ranks))
            order.remove(block)
            del ranks[block]
        elif ranks:
            block = order.take_first()
            assert ranks[block] == min(ranks.values())
            age = max(age, ranks.pop(block)[0])
        assert sorted(order.blocks()) == sorted(ranks)
        assert len(order) == len(ranks)


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(POLICIES))
def test_the_pool_equation_holds_under_every_policy(seed: int, policy: EvictionName) -> None:
    rng = random.Random(seed)
    cache = Cache(policy, 24, column_cost=0.5)
    rows: list[list[int]] = []
    for step in range(60):
        if len(rows) < 3:
            rows.append(cache.begin("".join(rng.choice("ab") for _ in range(rng.randrange(1, 8)))))
        else:
            fence = step if rng.random() < 0.5 else None
            cache.pool.release(reversed(rows.pop(rng.randrange(3))), fence)
        if rng.random() < 0.5:
            cache.pool.complete(step)
        cache.pool.check()
    cache.pool.complete(1000)
    for row in rows:
        cache.pool.release(reversed(row), None)
    assert (cache.pool.num_in_use, cache.pool.num_fenced) == (0, 0)
    assert len(set(cache.pool.take_many(cache.pool.num_available))) == 24, "every block can be had"
    cache.pool.check()
