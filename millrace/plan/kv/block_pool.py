"""The pool of KV blocks: reference counts, states and fences.

Every block is in exactly one of five states, and the pool equation always holds:
    free + cached + fenced + held + in use = total
  free    has no content worth keeping
  cached  unreferenced, but registered under its hash (`named_blocks.py`); evicted in the order of a policy
          (`cached_blocks.py`)
  fenced  released, but a launched step may still touch it; becomes free, cached or held when that step completes
  held    no row references it, but it is leaving for host memory or arriving from there (`host_tier.py`)
  in use  referenced by at least one row
Block 0 is scratch space for padding: never allocated and not counted.

Every KV group takes its blocks from the same pool, since all have the same number of layers.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from millrace.plan.kv.cached_blocks import CachedBlocks
from millrace.plan.kv.eviction import EvictionSettings
from millrace.plan.kv.named_blocks import NamedBlocks
from millrace.plan.kv.tier import Tier

NO_FENCE = -1


class BlockUse(NamedTuple):
    num_refs: int
    """Rows that reference the block."""
    num_hits: int
    """Requests that found it."""
    used_at: float
    """When it was filled or found last."""
    is_moving: bool
    """A copy needs it, and no row."""


LRU = EvictionSettings()


class BlockPool:
    def __init__(
        self,
        num_blocks: int,
        num_groups: int = 1,
        tiers: Sequence[Tier] = (),
        eviction: EvictionSettings = LRU,
    ) -> None:
        self.total = num_blocks
        self.withholds_dirty = bool(tiers)
        """True while dirty blocks wait for their copy to host memory instead of being evicted."""
        self.num_evicted = 0
        self.num_evicted_for_arrivals = 0
        self.named = NamedBlocks(num_blocks, num_groups)
        self.cached = CachedBlocks(self.named, tiers, eviction)
        self._has_tiers = bool(tiers)
        self._free = list(range(num_blocks, 0, -1))
        self._holds: dict[int, int] = {}
        """Number of copies and arrivals that need each block, rows or not."""
        self._held: set[int] = set()
        """Blocks in the state held."""
        self.num_fenced = 0
        self._fence_of = array("q", (NO_FENCE,)) * (num_blocks + 1)
        """The step that each fenced block waits for. An array is small enough to stay in the processor's caches."""
        self._fences: deque[tuple[int, list[int]]] = deque()
        self._refs = [0] * (num_blocks + 1)
        self._num_shared = 0
        """Blocks that several rows reference."""

    # -- figures ---------------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self.cached)

    @property
    def num_reserved(self) -> int:
        """Retained blocks that admission leaves alone. With further tiers none: they would only move down."""
        return 0 if self._has_tiers else self.cached.num_retained

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def num_available(self) -> int:
        """Blocks that `take_many` can return now: free and cached, without dirty ones that are withheld, and without
        retained ones as long as those are there."""
        cached = self.cached
        num_clean = len(self._free) + len(cached.clean)
        if not self.withholds_dirty:
            return num_clean + len(cached.dirty) + len(cached.retained) + len(cached.retained_dirty)
        return num_clean if cached.dirty else num_clean + len(cached.retained)

    @property
    def num_soon(self) -> int:
        """Blocks that become available when copies to or from host memory complete."""
        return self.cached.num_dirty + len(self._held) if self.withholds_dirty else 0

    @property
    def num_in_use(self) -> int:
        return self.total - len(self._free) - len(self.cached) - self.num_fenced - len(self._held)

    def num_unreferenced(self, blocks: Iterable[int]) -> int:
        """Number of these blocks without a reference, and without a handle that names them."""
        refs, is_retained = self._refs, self.cached.is_retained
        return sum(refs[block] == 0 and not is_retained(block) for block in blocks)

    def num_refs(self, block: int) -> int:
        """Rows that reference the block."""
        return self._refs[block]

    def use_of(self, digest: bytes) -> BlockUse | None:
        """Of the block of group 0 with this hash; None if there is none."""
        block, uses = self.named.block_of(digest), self.named.uses
        if block is None:
            return None
        is_moving = block in self._held
        return BlockUse(self._refs[block], uses.counts[block] - 1, uses.used_at[block], is_moving)

    def num_by_state(self) -> dict[str, int]:
        """All blocks: the values add up to the total."""
        num_retained = self.cached.num_retained
        return {
            "in_use": self.num_in_use - self._num_shared,
            "shared": self._num_shared,
            "ending": self.num_fenced,
            "moving": len(self._held),
            "kept": num_retained,
            "cached": len(self.cached) - num_retained,
            "free": len(self._free),
        }

    # -- take and release ------------------------------------------------------------------------------------------

    def take_many(self, count: int) -> list[int]:
        """Allocate blocks with one reference each, evicting where none is free. The caller has checked
        `num_available`."""
        free, refs = self._free, self._refs
        first = max(0, len(free) - count)
        blocks = free[first:]
        del free[first:]
        blocks.reverse()
        if len(blocks) < count:
            num_evicted = count - len(blocks)
            blocks += self.cached.evict(num_evicted)
            self.num_evicted += num_evicted
        for block in blocks:
            refs[block] = 1
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Add a reference to each of these blocks, which `NamedBlocks.find` returned."""
        refs, fence_of, uses = self._refs, self._fence_of, self.named.uses
        counts, used_at, now = uses.counts, uses.used_at, uses.now
        for block in blocks:
            if refs[block] == 0:
                if fence_of[block] != NO_FENCE:
                    fence_of[block] = NO_FENCE
                    self.num_fenced -= 1
                elif not self.cached.remove(block):
                    self._held.remove(block)
            refs[block] += 1
            if refs[block] == 2:
                self._num_shared += 1
            counts[block] += 1
            used_at[block] = now

    def release(self, blocks: Iterable[int], fence: int | None) -> None:
        """Drop a reference to each block. Unreferenced blocks are fenced until step `fence` (None = no step in flight).

        Pass the blocks of a sequence in reverse, so that its tail is evicted before its head.
        """
        left_over, refs, fence_of = [], self._refs, self._fence_of
        for block in blocks:
            refs[block] = left = refs[block] - 1
            if left > 0:
                if left == 1:
                    self._num_shared -= 1
                continue
            if left < 0:
                raise AssertionError(f"block {block} was released twice")
            left_over.append(block)
            if fence is not None:
                fence_of[block] = fence
        if fence is None:
            self._retire(left_over)
        elif left_over:
            self._fences.append((fence, left_over))
            self.num_fenced += len(left_over)

    def complete(self, step_no: int) -> None:
        """Step `step_no` and all before it have completed: lift their fences."""
        fence_of = self._fence_of
        while self._fences and self._fences[0][0] <= step_no:
            fence, blocks = self._fences.popleft()
            # A block that was shared and released again since then has a newer fence.
            lifted = [block for block in blocks if fence_of[block] == fence]
            for block in lifted:
                fence_of[block] = NO_FENCE
            self.num_fenced -= len(lifted)
            self._retire(lifted)

    def _retire(self, blocks: Sequence[int]) -> None:
        """These blocks are no longer used: each becomes free, cached or held."""
        hash_of, holds = self.named.hash_of, self._holds
        if holds:
            self._held.update(block for block in blocks if block in holds)
            blocks = [block for block in blocks if block not in holds]
        self._free += [block for block in blocks if hash_of[block] is None]
        self.cached.add_many([block for block in blocks if hash_of[block] is not None])

    def forget(self, mark: bytes) -> int:
        """Nobody finds the blocks of the owner with this mark any longer; those that no row uses are free at once.
        Returns how many blocks there were."""
        blocks = self.named.of_owner(mark)
        for block in blocks:
            self.cached.forget(block)
            if self.cached.remove(block):
                self._free.append(block)
        return len(blocks)

    # -- further tiers ---------------------------------------------------------------------------------------------

    def take_held(self, count: int) -> list[int]:
        """Allocate blocks for contents that arrive from host memory."""
        before = self.num_evicted
        blocks = self.take_many(count)
        self.num_evicted_for_arrivals += self.num_evicted - before
        for block in blocks:
            self._refs[block] = 0
            self._holds[block] = 1
        self._held.update(blocks)
        return blocks

    def hold(self, blocks: Iterable[int]) -> None:
        """Keep these registered blocks: nothing evicts them before `unhold`."""
        for block in blocks:
            self._holds[block] = self._holds.get(block, 0) + 1
            if self._refs[block] == 0 and self._fence_of[block] == NO_FENCE and block not in self._held:
                self.cached.remove(block)
                self._held.add(block)

    def unhold(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._holds[block] -= 1
            if self._holds[block] == 0:
                del self._holds[block]
                if block in self._held:
                    self._held.remove(block)
                    self._retire((block,))

    # -- checks ----------------------------------------------------------------------------------------------------

    def check_sums(self) -> None:
        """Check the pool equation. Takes milliseconds for a million blocks, so production samples it."""
        unreferenced = self._refs.count(0) - 1
        parts = (len(self._free), self.num_cached, self.num_fenced, len(self._held))
        if sum(parts) != unreferenced:
            raise AssertionError(f"pool equation broken: {parts} of {unreferenced} unreferenced blocks")

    def check(self) -> None:
        """Check the pool equation and that the states are disjoint. For tests."""
        self.check_sums()
        free, cached = set(self._free), set(self.cached.blocks())
        fenced = {block for block, fence in enumerate(self._fence_of) if fence != NO_FENCE}
        if len(fenced) != self.num_fenced:
            raise AssertionError(f"{len(fenced)} blocks are fenced, {self.num_fenced} are counted")
        used = {block for block in range(1, self.total + 1) if self._refs[block] > 0}
        parts = [free, cached, fenced, self._held, used]
        if sum(map(len, parts)) != self.total or len(set().union(*parts)) != self.total:
            raise AssertionError(f"pool equation broken: {[len(part) for part in parts]} of {self.total}")
        if self._held != self._holds.keys() - used - fenced:
            raise AssertionError("a block that a copy needs is free or cached")
        if sum(refs > 1 for refs in self._refs) != self._num_shared:
            raise AssertionError(f"{self._num_shared} blocks are counted as shared")
        if len(free) != len(self._free):
            raise AssertionError("a block is free twice")
        self.cached.check()
        self.named.check(free)
