"""The pool of KV blocks: reference counts, the prefix cache by block hash, eviction and fences.

Every block is in exactly one of five states, and the pool equation always holds:
    free + cached + fenced + held + in use = total
  free    has no content worth keeping
  cached  unreferenced, but registered under its hash; evicted in the order of a policy (`eviction.py`), those that a
          handle names last (`retention.py`)
  fenced  released, but a launched step may still touch it; becomes free, cached or held when that step completes
  held    no row references it, but it is leaving for host memory or arriving from there (`host_tier.py`)
  in use  referenced by at least one row
With further tiers, a cached block is dirty while they all lack it. Dirty blocks are evicted last. Those that a handle
names move down the tiers as others do, after all others.
Block 0 is scratch space for padding: never allocated and not counted.

Every KV group takes its blocks from the same pool, since all have the same number of layers. A hash names the content
of one block per group.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from millrace.plan.kv.block_hash import num_common
from millrace.plan.kv.eviction import Eviction, EvictionOrder, EvictionSettings, LeastRecentlyUsed
from millrace.plan.kv.tier import CacheKey, Tier
from millrace.plan.planner.journal import KvJournal

NO_FENCE = -1


class BlockUses:
    """How often and when blocks were used."""

    def __init__(self, num_blocks: int) -> None:
        self.counts = array("i", bytes(4 * (num_blocks + 1)))
        """Requests that computed or found each registered block."""
        self.used_at = array("d", bytes(8 * (num_blocks + 1)))
        self.now = 0.0
        """Time of the last plan."""
        self.num_shared = 0
        """Blocks that several rows reference."""


class Siblings:
    """Children of the same parent, as lists. Group 0."""

    def __init__(self, num_blocks: int) -> None:
        self.older, self.newer = (array("i", bytes(4 * (num_blocks + 1))) for _ in range(2))
        """The sibling that was registered before each block, and the one after it; 0 if there is none."""
        self.last_first: dict[bytes, int] = {}
        """The last registered child of parents without a block, by their hash: first blocks follow a root."""

    def join(self, block: int, older: int) -> None:
        if older:
            self.older[block], self.newer[older] = older, block

    def leave(self, block: int) -> int:
        """Returns the next older one."""
        older, newer = self.older[block], self.newer[block]
        self.older[block] = self.newer[block] = 0
        if older:
            self.newer[older] = newer
        if newer:
            self.older[newer] = older
        return older


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
        self._tiers = tiers
        self.withholds_dirty = bool(tiers)
        """True while dirty blocks wait for their copy to host memory instead of being evicted."""
        self.num_lost = 0
        """Dirty blocks that were evicted."""
        self.num_evicted = 0
        self.num_evicted_for_arrivals = 0
        self.num_evicted_retained = 0
        """Blocks that a handle named."""
        self.journal: KvJournal | None = None
        """Notes the blocks of group 0; None while nobody reads it."""
        self._free = list(range(num_blocks, 0, -1))
        self.uses = BlockUses(num_blocks)
        policy = Eviction(eviction, self.uses.counts)
        self._records = policy.records
        """None if the policy needs none."""
        self._cached: EvictionOrder = policy.make_order()
        """Cached blocks that are not dirty."""
        self._dirty: EvictionOrder = policy.make_order()
        self._retained, self._retained_dirty = LeastRecentlyUsed(), LeastRecentlyUsed()
        """Cached blocks that a handle names (`retention.py`): evicted last; those that are dirty are copied last."""
        self.retained_names: Counter[bytes] = Counter()
        """Hashes that handles name, with how many do."""
        self._holds: dict[int, int] = {}
        """Number of copies and arrivals that need each block, rows or not."""
        self._held: set[int] = set()
        """Blocks in the state held."""
        self.num_fenced = 0
        self._fence_of = array("q", (NO_FENCE,)) * (num_blocks + 1)
        """The step that each fenced block waits for. An array is small enough to stay in the processor's caches."""
        self._fences: deque[tuple[int, list[int]]] = deque()
        self._refs = [0] * (num_blocks + 1)
        self._hash_of: list[bytes | None] = [None] * (num_blocks + 1)
        self._tokens_of: list[bytes | None] = [None] * (num_blocks + 1)
        self._group_of = bytearray(num_blocks + 1)
        self._by_hash: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        self._parent_of = array("i", bytes(4 * (num_blocks + 1)))
        """The block before each registered one in its sequence, 0 if none was registered. Group 0."""
        self._last_child_of = array("i", bytes(4 * (num_blocks + 1)))
        """The most recently registered child of each block: one that follows it in a sequence. Group 0."""
        self._siblings = Siblings(num_blocks)
        self._parent_hash_of = [b""] * (num_blocks + 1)
        """Of each registered block. Group 0."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached) + len(self._dirty) + self.num_retained

    @property
    def num_retained(self) -> int:
        """Cached blocks that a handle names."""
        return len(self._retained) + len(self._retained_dirty)

    @property
    def num_reserved(self) -> int:
        """Retained blocks that admission leaves alone. With further tiers none: they would only move down."""
        return 0 if self._tiers else self.num_retained

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def num_available(self) -> int:
        """Blocks that `take_many` can return now: free and cached, without dirty ones that are withheld, and without
        retained ones as long as those are there."""
        num_clean = len(self._free) + len(self._cached)
        if not self.withholds_dirty:
            return num_clean + len(self._dirty) + self.num_retained
        return num_clean if self._dirty else num_clean + len(self._retained)

    @property
    def num_soon(self) -> int:
        """Blocks that become available when copies to or from host memory complete."""
        num_dirty = len(self._dirty) + len(self._retained_dirty)
        return num_dirty + len(self._held) if self.withholds_dirty else 0

    @property
    def num_in_use(self) -> int:
        return self.total - len(self._free) - self.num_cached - self.num_fenced - len(self._held)

    def _evict(self, count: int) -> list[int]:
        cached, by_hash, group_of = self._cached, self._by_hash, self._group_of
        hash_of, tokens_of = self._hash_of, self._tokens_of
        blocks = []
        for _ in range(count):
            if cached:
                block = cached.take_first()
            elif self._dirty:
                block = self._dirty.take_first()
                self.num_lost += 1
            elif self._retained:
                block = self._retained.take_first()
                self.num_evicted_retained += 1
            else:
                block = self._retained_dirty.take_first()
                self.num_evicted_retained += 1
                self.num_lost += 1
            digest, group = hash_of[block], group_of[block]
            if digest is None:
                raise AssertionError(f"block {block} is cached without a hash")
            del by_hash[group][digest]
            if group == 0:
                self._leave_parent(block)
                if self.journal is not None:
                    self.journal.note("evicted", "device", digest)
            hash_of[block] = tokens_of[block] = None
            blocks.append(block)
        self.num_evicted += count
        return blocks

    def _leave_parent(self, block: int) -> None:
        """The block is evicted: it is no child any longer, and its children have no parent."""
        parent, last_child_of = self._parent_of[block], self._last_child_of
        last_child_of[block] = 0
        older = self._siblings.leave(block)
        if self._records is not None and self._records.end(block, parent):
            self._cached.on_leaf(parent)
            self._dirty.on_leaf(parent)
        if parent:
            if last_child_of[parent] == block:
                last_child_of[parent] = older
            return
        root, firsts = self._parent_hash_of[block], self._siblings.last_first
        if firsts.get(root) == block:
            if older:
                firsts[root] = older
            else:
                del firsts[root]

    def take_many(self, count: int) -> list[int]:
        """Allocate blocks with one reference each, evicting where none is free. The caller has checked
        `num_available`."""
        free, refs = self._free, self._refs
        first = max(0, len(free) - count)
        blocks = free[first:]
        del free[first:]
        blocks.reverse()
        if len(blocks) < count:
            blocks += self._evict(count - len(blocks))
        for block in blocks:
            refs[block] = 1
        return blocks

    def find(self, digest: bytes, tokens: bytes, group: int = 0) -> int | None:
        """The group's registered block with this hash, or None. Compares the tokens too."""
        block = self._by_hash[group].get(digest)
        return block if block is not None and self._tokens_of[block] == tokens else None

    @property
    def names(self) -> Collection[bytes]:
        """Hashes of the registered blocks of group 0."""
        return self._by_hash[0]

    def digests(self) -> list[bytes]:
        """Hashes of all blocks of group 0 that `find` finds."""
        return list(self._by_hash[0])

    def share(self, blocks: Sequence[int]) -> None:
        """Add a reference to each of these blocks, which `find` returned."""
        refs, fence_of, cached = self._refs, self._fence_of, self._cached
        uses, used_at, now = self.uses.counts, self.uses.used_at, self.uses.now
        for block in blocks:
            if refs[block] == 0:
                if fence_of[block] != NO_FENCE:
                    fence_of[block] = NO_FENCE
                    self.num_fenced -= 1
                elif block in cached:
                    cached.remove(block)
                elif block in self._dirty:
                    self._dirty.remove(block)
                elif block in self._retained:
                    self._retained.remove(block)
                elif block in self._retained_dirty:
                    self._retained_dirty.remove(block)
                else:
                    self._held.remove(block)
            refs[block] += 1
            if refs[block] == 2:
                self.uses.num_shared += 1
            uses[block] += 1
            used_at[block] = now

    def register(
        self, blocks: list[int], hashes: list[bytes], tokens: list[bytes], parent: bytes, group: int = 0
    ) -> None:
        """Make full, computed blocks of a sequence available to `find`; 0 stands for a block that was freed. Of blocks
        with equal content, the first stays registered. `parent`: hash of the block before the first one."""
        by_hash, hash_of, tokens_of, group_of = self._by_hash[group], self._hash_of, self._tokens_of, self._group_of
        before = by_hash.get(parent, 0)
        for block, digest, own in zip(blocks, hashes, tokens, strict=True):
            registered = by_hash.setdefault(digest, block) if block else by_hash.get(digest, 0)
            if block and registered == block and hash_of[block] is None:
                hash_of[block], tokens_of[block], group_of[block] = digest, own, group
                self.uses.counts[block], self.uses.used_at[block] = 1, self.uses.now
                if self._records is not None:
                    self._records.begin(block, before if group == 0 else 0)
                if group == 0:
                    self._follow(block, before, parent)
                    if self.journal is not None:
                        self.journal.note("filled", "device", digest)
            before, parent = registered, digest

    def _follow(self, block: int, before: int, parent: bytes) -> None:
        """The block, newly registered, follows `before` in a sequence. `parent`: the hash of that block."""
        self._parent_of[block], self._parent_hash_of[block] = before, parent
        self._siblings.join(block, self._last_child(before, parent))
        if before:
            self._last_child_of[before] = block
        else:
            self._siblings.last_first[parent] = block

    def find_child(self, before: int, parent: bytes, tokens: bytes) -> tuple[int, bytes] | None:
        """The last registered child of the block `before`, whose hash is `parent`, and the child's hash, if it has
        these tokens. Parent and tokens determine the hash, so it need not be computed. `before` is 0 for a root."""
        block = self._last_child(before, parent)
        digest = self._hash_of[block]
        return (block, digest) if digest is not None and self._tokens_of[block] == tokens else None

    def nearest_child(self, before: int, parent: bytes, own: bytes, most: int) -> tuple[int, bytes]:
        """Of the last `most` children of that block the one with which most of `own` tokens agree: how many do, and its
        tokens. -1 if it has no child."""
        block, length, best, better = self._last_child(before, parent), -1, b"", b""
        tokens_of, older = self._tokens_of, self._siblings.older
        for _ in range(most):
            if not block:
                break
            cached = tokens_of[block]
            if cached is None:
                raise AssertionError(f"block {block} is a child without content")
            if cached.startswith(better):
                length, best = num_common(own, cached), cached
                better = own[: 4 * (length + 1)]
            block = older[block]
        return length, best

    def _last_child(self, before: int, parent: bytes) -> int:
        return self._last_child_of[before] if before else self._siblings.last_first.get(parent, 0)

    def num_unreferenced(self, blocks: Iterable[int]) -> int:
        """Number of these blocks without a reference, and without a handle that names them."""
        refs, retained, dirty = self._refs, self._retained, self._retained_dirty
        return sum(refs[block] == 0 and block not in retained and block not in dirty for block in blocks)

    def num_refs(self, block: int) -> int:
        """Rows that reference the block."""
        return self._refs[block]

    def newest(self) -> Iterator[bytes]:
        """Hashes of the registered blocks of group 0, the last registered first."""
        return reversed(self._by_hash[0])

    def parent_hash(self, digest: bytes) -> bytes | None:
        """Of the block of group 0 with this hash; None if there is none."""
        block = self._by_hash[0].get(digest)
        return None if block is None else self._parent_hash_of[block]

    def use_of(self, digest: bytes) -> BlockUse | None:
        """Of the block of group 0 with this hash; None if there is none."""
        block = self._by_hash[0].get(digest)
        if block is None:
            return None
        is_moving = block in self._held
        return BlockUse(self._refs[block], self.uses.counts[block] - 1, self.uses.used_at[block], is_moving)

    def num_by_state(self) -> dict[str, int]:
        """All blocks: the values add up to the total."""
        return {
            "in_use": self.num_in_use - self.uses.num_shared,
            "shared": self.uses.num_shared,
            "ending": self.num_fenced,
            "moving": len(self._held),
            "kept": self.num_retained,
            "cached": len(self._cached) + len(self._dirty),
            "free": len(self._free),
        }

    def release(self, blocks: Iterable[int], fence: int | None) -> None:
        """Drop a reference to each block. Unreferenced blocks are fenced until step `fence` (None = no step in flight).

        Pass the blocks of a sequence in reverse, so that its tail is evicted before its head.
        """
        left_over, refs, fence_of = [], self._refs, self._fence_of
        for block in blocks:
            refs[block] = left = refs[block] - 1
            if left > 0:
                if left == 1:
                    self.uses.num_shared -= 1
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

    def _retire(self, blocks: Iterable[int]) -> None:
        """These blocks are no longer used: each becomes free, cached, dirty or held."""
        hash_of, free, holds, tiers, names = (self._hash_of, self._free, self._holds, self._tiers, self.retained_names)
        for block in blocks:
            if block in holds:
                self._held.add(block)
            elif hash_of[block] is None:
                free.append(block)
            else:
                is_dirty = bool(tiers) and self._lacks_copy(block)
                if names and hash_of[block] in names:
                    (self._retained_dirty if is_dirty else self._retained).add(block)
                else:
                    (self._dirty if is_dirty else self._cached).add(block)

    def _lacks_copy(self, block: int) -> bool:
        """True if no tier has the block. In those that have it, it counts as used."""
        key, is_dirty = self._key(block), True
        for tier in self._tiers:
            if key in tier:
                tier.touch(key)
                is_dirty = False
        return is_dirty

    def _uncache(self, block: int) -> bool:
        """False if the block was not cached."""
        for order in (self._cached, self._dirty, self._retained, self._retained_dirty):
            if block in order:
                order.remove(block)
                return True
        return False

    # -- handles ---------------------------------------------------------------------------------------------------

    def retain(self, digests: Iterable[bytes]) -> None:
        """One more handle names these blocks, cached or not."""
        names = self.retained_names
        for digest in digests:
            names[digest] += 1
            if names[digest] == 1:
                for block in self._named(digest):
                    if block in self._cached or block in self._dirty:
                        order = self._retained_dirty if block in self._dirty else self._retained
                        self._uncache(block)
                        order.add(block)

    def let_go(self, digests: Sequence[bytes]) -> None:
        """One handle fewer names these blocks. Those without any become the last to be evicted of the others."""
        names = self.retained_names
        for digest in reversed(digests):
            names[digest] -= 1
            if not names[digest]:
                del names[digest]
                for block in self._named(digest):
                    if block in self._retained or block in self._retained_dirty:
                        self._uncache(block)
                        self._retire((block,))

    def _named(self, digest: bytes) -> list[int]:
        """The blocks with this hash, of all groups."""
        return [by_hash[digest] for by_hash in self._by_hash if digest in by_hash]

    def forget(self, mark: bytes) -> int:
        """Nobody finds the blocks of the owner with this mark any longer; those that no row uses are free at once.
        Returns how many blocks there were."""
        count = 0
        for group, by_hash in enumerate(self._by_hash):
            for digest in [one for one in reversed(by_hash) if one.endswith(mark)]:
                block = by_hash.pop(digest)
                if group == 0:
                    self._leave_parent(block)
                    if self.journal is not None:
                        self.journal.note("evicted", "device", digest)
                self._hash_of[block] = self._tokens_of[block] = None
                count += 1
                if self._uncache(block):
                    self._free.append(block)
        return count

    def num_leading(self, digests: Iterable[bytes]) -> int:
        """How many of these hashes, from the first on, have a block in group 0."""
        by_hash, count = self._by_hash[0], 0
        for digest in digests:
            if digest not in by_hash:
                break
            count += 1
        return count

    # -- further tiers ---------------------------------------------------------------------------------------------

    def _key(self, block: int) -> CacheKey:
        digest = self._hash_of[block]
        if digest is None:
            raise AssertionError(f"block {block} is not registered")
        return self._group_of[block], digest

    def oldest_dirty(self) -> tuple[int, CacheKey, bytes] | None:
        """The dirty block to copy to host memory next, with its name there and its tokens."""
        block = self._dirty.first()
        if block is None:
            block = self._retained_dirty.first()
        if block is None:
            return None
        tokens = self._tokens_of[block]
        if tokens is None:
            raise AssertionError(f"block {block} is not registered")
        return block, self._key(block), tokens

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
                self._uncache(block)
                self._held.add(block)

    def unhold(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._holds[block] -= 1
            if self._holds[block] == 0:
                del self._holds[block]
                if block in self._held:
                    self._held.remove(block)
                    self._retire((block,))

    def give_up(self, block: int) -> None:
        """The block's copy to host memory failed: it may be evicted without one."""
        if block in self._dirty:
            self._dirty.remove(block)
            self._cached.add(block)
        elif block in self._retained_dirty:
            self._retained_dirty.remove(block)
            self._retained.add(block)

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
        retained = {*self._retained, *self._retained_dirty}
        free, cached = set(self._free), {*self._cached.blocks(), *self._dirty.blocks(), *retained}
        fenced = {block for block, fence in enumerate(self._fence_of) if fence != NO_FENCE}
        if len(fenced) != self.num_fenced:
            raise AssertionError(f"{len(fenced)} blocks are fenced, {self.num_fenced} are counted")
        used = {block for block in range(1, self.total + 1) if self._refs[block] > 0}
        parts = [free, cached, fenced, self._held, used]
        if sum(map(len, parts)) != self.total or len(set().union(*parts)) != self.total:
            raise AssertionError(f"pool equation broken: {[len(part) for part in parts]} of {self.total}")
        if self._held != self._holds.keys() - used - fenced:
            raise AssertionError("a block that a copy needs is free or cached")
        if any(self._hash_of[block] not in self.retained_names for block in retained):
            raise AssertionError("a block is retained that no handle names")
        if sum(refs > 1 for refs in self._refs) != self.uses.num_shared:
            raise AssertionError(f"{self.uses.num_shared} blocks are counted as shared")
        if len(free) != len(self._free):
            raise AssertionError("a block is free twice")
        for group, by_hash in enumerate(self._by_hash):
            for digest, block in by_hash.items():
                if self._hash_of[block] != digest or block in free or self._group_of[block] != group:
                    raise AssertionError(f"block {block} is registered wrongly")
