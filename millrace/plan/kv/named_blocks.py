"""Blocks whose content has a name: the prefix cache by block hash, and which block follows which in a sequence.

A hash names the content of one block per KV group. Parents and children are known of blocks of group 0.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator

from millrace.plan.kv.eviction import BlockRecords
from millrace.plan.kv.tier import CacheKey
from millrace.plan.planner.journal import KvJournal

Registered = tuple[int, int, bytes]
"""A block, the one before it, and its hash."""


class BlockUses:
    """How often and when blocks were used."""

    def __init__(self, num_blocks: int) -> None:
        self.counts = array("i", bytes(4 * (num_blocks + 1)))
        """Requests that computed or found each registered block."""
        self.used_at = array("d", bytes(8 * (num_blocks + 1)))
        self.now = 0.0
        """Time of the last plan."""


class NamedBlocks:
    def __init__(self, num_blocks: int, num_groups: int) -> None:
        self.journal: KvJournal | None = None
        """Notes the blocks of group 0; None while nobody reads it."""
        self.uses = BlockUses(num_blocks)
        self.records: BlockRecords | None = None
        """None if the policy of eviction needs none."""
        self.hash_of: list[bytes | None] = [None] * (num_blocks + 1)
        """None: the block has no name."""
        self._tokens_of: list[bytes | None] = [None] * (num_blocks + 1)
        self._group_of = bytearray(num_blocks + 1)
        self._by_hash: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        self._parent_of, self._last_child_of = _numbers(num_blocks), _numbers(num_blocks)
        """The block before each one in its sequence, 0 if none was registered; and its most recently registered child,
        one that follows it in a sequence."""
        self._older, self._newer = _numbers(num_blocks), _numbers(num_blocks)
        """Of the children of the same parent, the one that was registered before each block, and the one after it; 0 if
        there is none."""
        self._parent_hash_of = [b""] * (num_blocks + 1)
        self._last_first: dict[bytes, int] = {}
        """The last registered child of parents without a block, by their hash: first blocks follow a root."""

    # -- find ------------------------------------------------------------------------------------------------------

    def find(self, digest: bytes, tokens: bytes, group: int = 0) -> int | None:
        """The group's registered block with this hash, or None. Compares the tokens too."""
        block = self._by_hash[group].get(digest)
        return block if block is not None and self._tokens_of[block] == tokens else None

    def find_child(self, before: int, parent: bytes, tokens: bytes) -> tuple[int, bytes] | None:
        """The last registered child of the block `before`, whose hash is `parent`, and the child's hash, if it has
        these tokens. Parent and tokens determine the hash, so it need not be computed. `before` is 0 for a root."""
        block = self._last_child_of[before] if before else self._last_first.get(parent, 0)
        digest = self.hash_of[block]
        return (block, digest) if digest is not None and self._tokens_of[block] == tokens else None

    def tokens_of_children(self, before: int, parent: bytes, most: int) -> list[bytes]:
        """Of the last `most` registered children of that block, the last one first."""
        block = self._last_child_of[before] if before else self._last_first.get(parent, 0)
        tokens_of, older = self._tokens_of, self._older
        found: list[bytes] = []
        for _ in range(most):
            if not block:
                break
            tokens = tokens_of[block]
            if tokens is None:
                raise AssertionError(f"block {block} is a child without content")
            found.append(tokens)
            block = older[block]
        return found

    def block_of(self, digest: bytes) -> int | None:
        """The block of group 0 with this hash."""
        return self._by_hash[0].get(digest)

    def blocks_of(self, digest: bytes) -> list[int]:
        """The blocks with this hash, of all groups."""
        return [by_hash[digest] for by_hash in self._by_hash if digest in by_hash]

    def key_of(self, block: int) -> CacheKey:
        digest = self.hash_of[block]
        if digest is None:
            raise AssertionError(f"block {block} is not registered")
        return self._group_of[block], digest

    def content_of(self, block: int) -> tuple[CacheKey, bytes]:
        """Its name in other tiers, and its tokens."""
        tokens = self._tokens_of[block]
        if tokens is None:
            raise AssertionError(f"block {block} is not registered")
        return self.key_of(block), tokens

    @property
    def names(self) -> Collection[bytes]:
        """Hashes of the registered blocks of group 0."""
        return self._by_hash[0]

    def digests(self) -> list[bytes]:
        """Hashes of all blocks of group 0 that `find` finds."""
        return list(self._by_hash[0])

    def newest(self) -> Iterator[bytes]:
        """Hashes of the registered blocks of group 0, the last registered first."""
        return reversed(self._by_hash[0])

    def parent_hash(self, digest: bytes) -> bytes | None:
        """Of the block of group 0 with this hash; None if there is none."""
        block = self._by_hash[0].get(digest)
        return None if block is None else self._parent_hash_of[block]

    def num_leading(self, digests: Iterable[bytes]) -> int:
        """How many of these hashes, from the first on, have a block in group 0."""
        by_hash, count = self._by_hash[0], 0
        for digest in digests:
            if digest not in by_hash:
                break
            count += 1
        return count

    # -- register --------------------------------------------------------------------------------------------------

    def register(
        self, blocks: list[int], hashes: list[bytes], tokens: list[bytes], parent: bytes, group: int = 0
    ) -> None:
        """Make full, computed blocks of a sequence available to `find`; 0 stands for a block that was freed. Of blocks
        with equal content, the first stays registered. `parent`: hash of the block before the first one."""
        by_hash, hash_of, tokens_of = self._by_hash[group], self.hash_of, self._tokens_of
        counts, used_at, now = self.uses.counts, self.uses.used_at, self.uses.now
        before, is_first_group = by_hash.get(parent, 0), group == 0
        parent_of, parent_hash_of, last_child_of = self._parent_of, self._parent_hash_of, self._last_child_of
        noted: list[Registered] | None = [] if self.records is not None or self.journal is not None else None
        added = 0
        for block, digest, own in zip(blocks, hashes, tokens, strict=True):
            registered = by_hash.setdefault(digest, block) if block else by_hash.get(digest, 0)
            if block and registered == block and hash_of[block] is None:
                hash_of[block], tokens_of[block] = digest, own
                counts[block], used_at[block] = 1, now
                if not is_first_group:
                    self._group_of[block] = group
                elif before and before == added:  # That one has no other child.
                    parent_of[block], parent_hash_of[block], last_child_of[before] = before, parent, block
                else:
                    self._follow(block, before, parent)
                added = block
                if noted is not None:
                    noted.append((block, before, digest))
            before, parent = registered, digest
        if noted:
            self._note(noted, is_first_group=is_first_group)

    def _note(self, noted: list[Registered], *, is_first_group: bool) -> None:
        for block, before, digest in noted:
            if self.records is not None:
                self.records.begin(block, before if is_first_group else 0)
            if self.journal is not None and is_first_group:
                self.journal.note("filled", "device", digest)

    def _follow(self, block: int, before: int, parent: bytes) -> None:
        """The block, newly registered, follows `before` in a sequence. `parent`: the hash of that block."""
        self._parent_of[block], self._parent_hash_of[block] = before, parent
        if before:
            older = self._last_child_of[before]
            self._last_child_of[before] = block
        else:
            older = self._last_first.get(parent, 0)
            self._last_first[parent] = block
        if older:
            self._older[block], self._newer[older] = older, block

    # -- drop ------------------------------------------------------------------------------------------------------

    def drop_many(self, blocks: Iterable[int]) -> None:
        """These blocks are evicted, in this order, under a policy that needs no records."""
        hash_of, tokens_of, group_of, by_hash = self.hash_of, self._tokens_of, self._group_of, self._by_hash
        older_of, parent_of, last_child_of = self._older, self._parent_of, self._last_child_of
        journal = self.journal
        for block in blocks:
            digest = hash_of[block]
            if digest is None:
                raise AssertionError(f"block {block} is cached without a hash")
            hash_of[block] = tokens_of[block] = None
            if group_of[block]:
                del by_hash[group_of[block]][digest]
                group_of[block] = 0
                continue
            del by_hash[0][digest]
            last_child_of[block], parent = 0, parent_of[block]
            if parent and last_child_of[parent] == block and not older_of[block]:
                last_child_of[parent] = 0  # An only child.
            else:
                self._leave(block, parent)
            if journal is not None:
                journal.note("evicted", "device", digest)

    def drop(self, block: int) -> int:
        """The block is evicted. Returns the block before it if none follows that one any longer, under a policy that
        needs records; else 0."""
        parent, is_first_group = self._parent_of[block], not self._group_of[block]
        self.drop_many((block,))
        has_ended = self.records is not None and is_first_group and self.records.end(block, parent)
        return parent if has_ended else 0

    def _leave(self, block: int, parent: int) -> None:
        """The block is no child any longer."""
        older, newer = self._older[block], self._newer[block]
        self._older[block] = self._newer[block] = 0
        if older:
            self._newer[older] = newer
        if newer:
            self._older[newer] = older
        if parent:
            if self._last_child_of[parent] == block:
                self._last_child_of[parent] = older
            return
        root = self._parent_hash_of[block]
        if self._last_first.get(root) == block:
            if older:
                self._last_first[root] = older
            else:
                del self._last_first[root]

    def of_owner(self, mark: bytes) -> list[int]:
        """The blocks whose names end with this mark, group by group, the last registered first."""
        return [by_hash[one] for by_hash in self._by_hash for one in reversed(by_hash) if one.endswith(mark)]

    def check(self, free: Collection[int]) -> None:
        """For tests. `free`: blocks without content."""
        for group, by_hash in enumerate(self._by_hash):
            for digest, block in by_hash.items():
                if self.hash_of[block] != digest or block in free or self._group_of[block] != group:
                    raise AssertionError(f"block {block} is registered wrongly")


def _numbers(num_blocks: int) -> array[int]:
    """One for each block; an array is small enough to stay in the processor's caches."""
    return array("i", bytes(4 * (num_blocks + 1)))
