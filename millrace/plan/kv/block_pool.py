"""The pool of KV blocks: who holds which, which can be found again by content, which may be given out.

Every block is in exactly one of four states, and the pool equation holds at all times:
    free + cached + fenced + in use = total
  free    no content worth keeping
  cached  unreferenced, but its content is named by a hash and can be found; evicted least recently used first
  fenced  given back, but a launched step may still touch it; becomes free or cached when that step completes
  in use  referenced by one row or more
Block 0 is a scratch block for padding; it is never given out and not counted.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        self.total = num_blocks
        self._free = list(range(num_blocks, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._fence_of: dict[int, int] = {}
        self._fences: deque[tuple[int, list[int]]] = deque()
        self._refs = [0] * (num_blocks + 1)
        self._hash_of: list[bytes | None] = [None] * (num_blocks + 1)
        self._tokens_of: list[bytes | None] = [None] * (num_blocks + 1)
        self._by_hash: dict[bytes, int] = {}
        self._parent_of: list[bytes] = [b""] * (num_blocks + 1)
        self._follower_of: dict[bytes, int] = {}
        """Hash of a block to the block last named after it: where another's prompt parted from it."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_fenced(self) -> int:
        return len(self._fence_of)

    @property
    def num_available(self) -> int:
        """Blocks that `take` can give out now."""
        return len(self._free) + len(self._cached)

    @property
    def num_in_use(self) -> int:
        return self.total - len(self._free) - len(self._cached) - len(self._fence_of)

    def take(self) -> int:
        """A block for one owner. The caller has checked `num_available`."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
        self._refs[block] = 1
        return block

    def take_many(self, count: int) -> list[int]:
        """So many blocks, as if taken one by one."""
        if not 0 < count <= len(self._free):
            return [self.take() for _ in range(count)]
        blocks, refs = self._free[-count:], self._refs
        del self._free[-count:]
        blocks.reverse()
        for block in blocks:
            refs[block] = 1
        return blocks

    def find(self, name: bytes, tokens: bytes) -> int | None:
        """The block with this content, if it is anywhere on the device. Tokens are compared, not only the hash."""
        block = self._by_hash.get(name)
        return block if block is not None and self._tokens_of[block] == tokens else None

    def share(self, blocks: Iterable[int]) -> None:
        """One more owner for each of these, which `find` returned."""
        refs, fence_of, cached = self._refs, self._fence_of, self._cached
        for block in blocks:
            if refs[block] == 0 and fence_of.pop(block, None) is None:
                del cached[block]
            refs[block] += 1

    def name(self, block: int, name: bytes, tokens: bytes, parent: bytes = b"") -> None:
        """A full block's content is computed: let it be found. The first block with a content keeps the name."""
        if name not in self._by_hash:
            self._by_hash[name] = block
            self._hash_of[block] = name
            self._tokens_of[block] = tokens
            self._parent_of[block] = parent
            self._follower_of[parent] = block

    def after(self, parent: bytes, tokens: bytes) -> tuple[int, bytes] | None:
        """The block last named after the one with this hash, and its own hash, if these are its tokens: parent and
        tokens decide the hash, so that it need not be computed."""
        block = self._follower_of.get(parent)
        if block is None or self._tokens_of[block] != tokens:
            return None
        name = self._hash_of[block]
        return (block, name) if name is not None else None

    def num_unheld(self, blocks: Iterable[int]) -> int:
        """How many of them no row holds."""
        refs = self._refs
        return sum(refs[block] == 0 for block in blocks)

    def follower(self, parent: bytes) -> bytes | None:
        """The tokens of the block last named after the one with this hash, if it is still here."""
        block = self._follower_of.get(parent)
        return self._tokens_of[block] if block is not None else None

    def num_holders(self, block: int) -> int:
        """Rows that hold the block."""
        return self._refs[block]

    def give_back(self, blocks: Iterable[int], fence: int | None) -> None:
        """Drop one owner of each. Blocks with none left wait for step `fence` (None: no step is in flight).

        Pass a sequence's blocks last first: its tail is then evicted before its head.
        """
        fenced = []
        for block in blocks:
            self._refs[block] -= 1
            if self._refs[block] > 0:
                continue
            if self._refs[block] < 0:
                raise AssertionError(f"block {block} was given back twice")
            if fence is None:
                self._retire(block)
            else:
                self._fence_of[block] = fence
                fenced.append(block)
        if fenced and fence is not None:
            self._fences.append((fence, fenced))

    def complete(self, step_no: int) -> None:
        """Step `step_no` and all before it no longer touch anything."""
        while self._fences and self._fences[0][0] <= step_no:
            fence, blocks = self._fences.popleft()
            for block in blocks:
                # A block shared and given back again since then waits for its newer fence.
                if self._fence_of.get(block) == fence:
                    del self._fence_of[block]
                    self._retire(block)

    def _retire(self, block: int) -> None:
        if self._hash_of[block] is None:
            self._free.append(block)
        else:
            self._cached[block] = None

    def _forget(self, block: int) -> None:
        name = self._hash_of[block]
        if name is not None:
            del self._by_hash[name]
            if self._follower_of.get(self._parent_of[block]) == block:
                del self._follower_of[self._parent_of[block]]
        self._hash_of[block] = None
        self._tokens_of[block] = None

    def check_sums(self) -> None:
        """The pool equation alone, in a few milliseconds even for a million blocks: for sampling in production."""
        unheld, parts = self._refs.count(0) - 1, (len(self._free), len(self._cached), len(self._fence_of))
        if sum(parts) != unheld:
            raise AssertionError(f"pool equation broken: {parts} of {unheld} blocks that nobody holds")

    def check(self) -> None:
        """The pool equation and the disjointness of its states; raises on any breach. For tests."""
        self.check_sums()
        free, cached, fenced = set(self._free), set(self._cached), set(self._fence_of)
        used = {block for block in range(1, self.total + 1) if self._refs[block] > 0}
        parts = [free, cached, fenced, used]
        if sum(map(len, parts)) != self.total or len(set().union(*parts)) != self.total:
            raise AssertionError(f"pool equation broken: {[len(part) for part in parts]} of {self.total}")
        if len(free) != len(self._free):
            raise AssertionError("a block is free twice")
        for name, block in self._by_hash.items():
            if self._hash_of[block] != name or block in free:
                raise AssertionError(f"block {block} is named wrongly")
