"""Which cached block is evicted next: one small class per policy (`--kv-eviction`).

- lru: the least recently used. Needs no record of blocks.
- frequency: the one that requests used least often; each eviction ages those that stay, so old fame fades.
- cost: the one that is cheapest to compute again, per byte, for the times that it was used; ages the same way.

The last two rank blocks by a number. A block is evicted before the block that precedes it in its sequence, without
which it could not be found.
"""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from millrace.config import EvictionName

MIN_STALE = 64
"""Removed entries that a heap may hold beside as many as it has blocks."""

Worth = Callable[[int, int], float]
"""Times that a block was used, and its column, to what it is worth."""


@dataclass(frozen=True, slots=True)
class EvictionSettings:
    policy: EvictionName = "lru"
    column_cost: float = 0.0
    """Time to compute a block grows by this share of the first block's with each column before it."""


class EvictionOrder(Protocol):
    """Cached blocks, in the order in which they are evicted."""

    def __len__(self) -> int: ...
    def __contains__(self, block: object, /) -> bool: ...
    def add(self, block: int) -> None:
        """The block is cached from now on."""

    def add_many(self, blocks: Sequence[int]) -> None: ...
    def remove(self, block: int) -> None: ...
    def first(self) -> int | None:
        """The block to evict next."""

    def take_first(self) -> int:
        """Remove and return it. There is one."""

    def on_leaf(self, block: int) -> None:
        """The last registered block that followed this one was evicted. It need not be in this order."""

    def blocks(self) -> list[int]: ...


class LeastRecentlyUsed(OrderedDict[int, None]):
    def add(self, block: int) -> None:
        self[block] = None

    def add_many(self, blocks: Sequence[int]) -> None:
        for block in blocks:  # In two thirds of the time of `update`.
            self[block] = None

    def remove(self, block: int) -> None:
        del self[block]

    def first(self) -> int | None:
        return next(iter(self), None)

    def take_first(self) -> int:
        return self.popitem(last=False)[0]

    def take_many(self, count: int) -> list[int]:
        popitem = self.popitem
        return [popitem(last=False)[0] for _ in range(count)]

    def on_leaf(self, block: int) -> None: ...

    def blocks(self) -> list[int]:
        return list(self)


class BlockRecords:
    """What the ranking policies know of registered blocks."""

    def __init__(self, uses: array[int]) -> None:
        """`uses`: requests that computed or found each block."""
        self.uses, zeros = uses, bytes(4 * len(uses))
        self.columns = array("i", zeros)
        """Blocks before it in its sequence."""
        self.num_children = array("i", zeros)
        """Registered blocks that follow it."""
        self._stamps = array("i", zeros)
        """Increased when a block is registered: tells a parent from what its memory held before."""
        self._parent_stamps = array("i", zeros)

    def begin(self, block: int, parent: int) -> None:
        """The block is registered; `parent`: the block before it, 0 if there is none."""
        self.num_children[block] = 0
        self._stamps[block] += 1
        self.columns[block] = self.columns[parent] + 1 if parent else 0
        if parent:
            self.num_children[parent] += 1
            self._parent_stamps[block] = self._stamps[parent]

    def end(self, block: int, parent: int) -> bool:
        """The block is evicted. True if its parent has no children left."""
        self._stamps[block] += 1
        if not parent or self._parent_stamps[block] != self._stamps[parent]:
            return False
        self.num_children[parent] -= 1
        return self.num_children[parent] == 0


class RankedBlocks:
    """Evicts the block of least rank: its worth, plus the highest rank evicted so far when it was cached."""

    def __init__(self, worth: Worth, records: BlockRecords) -> None:
        self._worth, self._records = worth, records
        self._age = 0.0
        self._heap: list[tuple[float, int, int]] = []
        """Rank, number and block; with entries of blocks that were removed."""
        self._entries: dict[int, tuple[float, int, int]] = {}
        """The valid entry of each block."""
        self._parents: dict[int, None] = {}
        """Blocks that came up for eviction while a registered block followed them."""
        self._next_number = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block: object, /) -> bool:
        return block in self._entries

    def add(self, block: int) -> None:
        rank = self._age + self._worth(self._records.uses[block], self._records.columns[block])
        entry = self._entries[block] = rank, self._next_number, block
        self._next_number += 1
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entries) + MIN_STALE:
            self._heap = [entry for block, entry in self._entries.items() if block not in self._parents]
            heapq.heapify(self._heap)

    def add_many(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.add(block)

    def remove(self, block: int) -> None:
        del self._entries[block]
        self._parents.pop(block, None)

    def first(self) -> int | None:
        while self._heap:
            entry = self._heap[0]
            block = entry[2]
            if self._entries.get(block) is entry:
                if not self._records.num_children[block]:
                    return block
                self._parents[block] = None
            heapq.heappop(self._heap)
        return next(iter(self._parents), None)  # What follows them is in use.

    def take_first(self) -> int:
        block = self.first()
        if block is None:
            raise AssertionError("no block is cached")
        self._age = max(self._age, self._entries[block][0])
        self.remove(block)
        return block

    def on_leaf(self, block: int) -> None:
        if block in self._parents:
            del self._parents[block]
            heapq.heappush(self._heap, self._entries[block])

    def blocks(self) -> list[int]:
        return list(self._entries)


def by_frequency(uses: int, column: int) -> float:
    return float(uses)


def by_cost(column_cost: float) -> Worth:
    """All blocks have as many bytes, so only the time to compute them differs."""

    def worth(uses: int, column: int) -> float:
        return uses * (1.0 + column * column_cost)

    return worth


class Eviction:
    """Makes the orders of one pool."""

    def __init__(self, settings: EvictionSettings, uses: array[int]) -> None:
        """`uses`: requests that computed or found each block."""
        ranks = settings.policy != "lru"
        self.records = BlockRecords(uses) if ranks else None
        self._worth = by_cost(settings.column_cost) if settings.policy == "cost" else by_frequency

    def make_order(self) -> EvictionOrder:
        if self.records is None:
            return LeastRecentlyUsed()
        return RankedBlocks(self._worth, self.records)
