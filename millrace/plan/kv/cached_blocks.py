"""Cached blocks: those that no row references and no copy needs, but that have a name. They may be evicted.

With further tiers, a cached block is dirty while they all lack it. Dirty blocks are evicted after the others, and those
that a handle names (`retention.py`) after all. Retained blocks move down the tiers as others do, after these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from millrace.plan.kv.eviction import Eviction, EvictionOrder, EvictionSettings, LeastRecentlyUsed
from millrace.plan.kv.named_blocks import NamedBlocks
from millrace.plan.kv.tier import CacheKey, Tier


class CachedBlocks:
    def __init__(self, named: NamedBlocks, tiers: Sequence[Tier], eviction: EvictionSettings) -> None:
        self._named, self._tiers = named, tiers
        policy = Eviction(eviction, named.uses.counts)
        named.records = policy.records
        self.clean: EvictionOrder = policy.make_order()
        self.dirty: EvictionOrder = policy.make_order()
        self.retained, self.retained_dirty = LeastRecentlyUsed(), LeastRecentlyUsed()
        """Those that a handle names."""
        self.retained_names: Counter[bytes] = Counter()
        """Hashes that handles name, with how many do."""
        self.num_lost = 0
        """Dirty blocks that were evicted."""
        self.num_evicted_retained = 0

    def __len__(self) -> int:
        return len(self.clean) + len(self.dirty) + self.num_retained

    @property
    def num_retained(self) -> int:
        return len(self.retained) + len(self.retained_dirty)

    @property
    def num_dirty(self) -> int:
        return len(self.dirty) + len(self.retained_dirty)

    def is_retained(self, block: int) -> bool:
        return block in self.retained or block in self.retained_dirty

    # -- add and remove --------------------------------------------------------------------------------------------

    def add_many(self, blocks: Sequence[int]) -> None:
        """These blocks, which have names, are cached from now on."""
        if self._tiers or self.retained_names:
            for block in blocks:
                self._add(block)
        else:
            self.clean.add_many(blocks)

    def _add(self, block: int) -> None:
        is_dirty, hash_of = bool(self._tiers) and self._lacks_copy(block), self._named.hash_of
        if self.retained_names and hash_of[block] in self.retained_names:
            (self.retained_dirty if is_dirty else self.retained).add(block)
        else:
            (self.dirty if is_dirty else self.clean).add(block)

    def _lacks_copy(self, block: int) -> bool:
        """True if no tier has the block. In those that have it, it counts as used."""
        key, is_dirty = self._named.key_of(block), True
        for tier in self._tiers:
            if key in tier:
                tier.touch(key)
                is_dirty = False
        return is_dirty

    def remove(self, block: int) -> bool:
        """False if the block was not cached."""
        for order in (self.clean, self.dirty, self.retained, self.retained_dirty):
            if block in order:
                order.remove(block)
                return True
        return False

    # -- evict -----------------------------------------------------------------------------------------------------

    def evict(self, count: int) -> list[int]:
        """So many blocks lose their names. There are as many."""
        blocks: list[int] = []
        if isinstance(self.clean, LeastRecentlyUsed):
            blocks = self.clean.take_many(min(count, len(self.clean)))
            self._named.drop_many(blocks)
        return blocks + [self._evict_one() for _ in range(count - len(blocks))]

    def _evict_one(self) -> int:
        is_retained = not self.clean and not self.dirty
        is_dirty = not self.clean and (bool(self.dirty) or not self.retained)
        self.num_evicted_retained += is_retained
        self.num_lost += is_dirty
        if is_retained:
            block = (self.retained_dirty if is_dirty else self.retained).take_first()
        else:
            block = (self.dirty if is_dirty else self.clean).take_first()
        self.forget(block)
        return block

    def forget(self, block: int) -> None:
        """The block, cached or not, loses its name."""
        parent = self._named.drop(block)
        if parent:
            self.clean.on_leaf(parent)
            self.dirty.on_leaf(parent)

    # -- handles ---------------------------------------------------------------------------------------------------

    def retain(self, digests: Iterable[bytes]) -> None:
        """One more handle names these blocks, cached or not."""
        names = self.retained_names
        for digest in digests:
            names[digest] += 1
            if names[digest] == 1:
                for block in self._named.blocks_of(digest):
                    if block in self.clean or block in self.dirty:
                        order = self.retained_dirty if block in self.dirty else self.retained
                        self.remove(block)
                        order.add(block)

    def let_go(self, digests: Sequence[bytes]) -> None:
        """One handle fewer names these blocks. Those without any become the last to be evicted of the others."""
        names = self.retained_names
        for digest in reversed(digests):
            names[digest] -= 1
            if not names[digest]:
                del names[digest]
                for block in self._named.blocks_of(digest):
                    if self.is_retained(block):
                        self.remove(block)
                        self._add(block)

    # -- further tiers ---------------------------------------------------------------------------------------------

    def oldest_dirty(self) -> tuple[int, CacheKey, bytes] | None:
        """The dirty block to copy to host memory next, with its name there and its tokens."""
        block = self.dirty.first()
        if block is None:
            block = self.retained_dirty.first()
        return None if block is None else (block, *self._named.content_of(block))

    def give_up(self, block: int) -> None:
        """The block's copy to host memory failed: it may be evicted without one."""
        if block in self.dirty:
            self.dirty.remove(block)
            self.clean.add(block)
        elif block in self.retained_dirty:
            self.retained_dirty.remove(block)
            self.retained.add(block)

    def blocks(self) -> list[int]:
        """For tests: with those that would be there twice, twice."""
        return [*self.clean.blocks(), *self.dirty.blocks(), *self.retained, *self.retained_dirty]

    def check(self) -> None:
        """For tests."""
        if any(
            self._named.hash_of[block] not in self.retained_names for block in (*self.retained, *self.retained_dirty)
        ):
            raise AssertionError("a block is retained that no handle names")
