"""Finding a request's prefix in the pool, and waiting for one that another request is computing right now."""

from __future__ import annotations

from collections.abc import Sequence

from millrace.plan.kv.block_hash import block_hash, root_hash
from millrace.plan.kv.block_pool import BlockPool
from millrace.plan.request import Request

KEPT_ROOTS = 1024


class PrefixIndex:
    """Matches whole blocks by chained hash. At least one token of a request is always left to compute."""

    def __init__(self, pool: BlockPool, block_size: int, enabled: bool) -> None:
        self._pool = pool
        self._block_size = block_size
        self._enabled = enabled
        self._pending: dict[bytes, int] = {}
        """Blocks that running rows have yet to fill from their known tokens: hash to request id."""
        self._expected: list[tuple[Request, int, int]] = []
        """Requests whose blocks, from one to before another, belong in `_pending`: to hash a long prompt takes a while,
        and nobody asks before the next request is looked at."""
        self._roots: dict[bytes, bytes] = {}
        self.query_tokens = 0
        self.hit_tokens = 0

    def match(self, request: Request) -> list[int]:
        """The longest run of blocks that already hold the request's first tokens. Takes no reference."""
        blocks: list[int] = []
        if not (self._enabled and request.read_cache):
            return blocks
        usable = (len(request.history) // 4 - 1) // self._block_size
        pool, history, width = self._pool, bytes(request.history), 4 * self._block_size
        hashes, parent = request.hashes, self._root(request.salt)
        for index in range(usable):
            tokens = history[index * width : (index + 1) * width]
            # What was computed last after the same beginning is most often what is sought, and its hash is known.
            follower = pool.after(parent, tokens) if index == len(hashes) else None
            if follower is not None:
                block, parent = follower
                hashes.append(parent)
                blocks.append(block)
                continue
            if index == len(hashes):
                hashes.append(block_hash(parent, tokens))
            parent = hashes[index]
            found = pool.find(parent, tokens)
            if found is None:
                break
            blocks.append(found)
        return blocks

    def must_wait(self, request: Request, num_matched: int) -> bool:
        """Whether the first block that is missing is being computed by a running request."""
        if not (self._enabled and request.read_cache):
            return False
        if num_matched >= (len(request.history) // 4 - 1) // self._block_size:
            return False
        self.settle()
        name = self.hash_of(request, num_matched)
        request.held_by = name if name in self._pending else None
        return request.held_by is not None

    def is_held(self, request: Request) -> bool:
        """A cheap repeat of `must_wait`: the block it waits for is still on its way."""
        if request.held_by is None:
            return False
        self.settle()
        return request.held_by in self._pending

    def expect(self, request: Request, num_matched: int) -> None:
        """A row begins to compute this request: its known full blocks are on their way."""
        if not self._enabled:
            return
        num_full = len(request.history) // 4 // self._block_size
        if num_full > num_matched:
            self._expected.append((request, num_matched, num_full))

    def settle(self) -> None:
        """Do what `expect` has left for later. Everything that asks what is on its way does so first."""
        if not self._expected:
            return
        expected, self._expected = self._expected, []
        for request, first, end in expected:
            self.hash_of(request, end - 1)
            for name in request.hashes[first:end]:
                self._pending.setdefault(name, request.id)

    def forget(self, request: Request) -> None:
        """The request leaves its row: what it has not filled is no longer on its way."""
        self.settle()
        for name in request.hashes:
            if self._pending.get(name) == request.id:
                del self._pending[name]

    def name_blocks(self, request: Request, first: int, blocks: Sequence[int]) -> None:
        """These blocks, of which the first is the request's block `first`, are filled and confirmed."""
        if not self._enabled or not blocks:
            return
        self.settle()
        self.hash_of(request, first + len(blocks) - 1)
        hashes, history, pending, width = request.hashes, bytes(request.history), self._pending, 4 * self._block_size
        parent = hashes[first - 1] if first else self._root(request.salt)
        for index, block in enumerate(blocks, first):
            name = hashes[index]
            self._pool.name(block, name, history[index * width : (index + 1) * width], parent)
            if pending.get(name) == request.id:
                del pending[name]
            parent = name

    def divergence(self, request: Request, num_matched: int) -> int:
        """Index of the first token that differs from the block last computed at this place, or -1 if there is none."""
        if not (self._enabled and request.read_cache):
            return -1
        held = self._pool.follower(self._parent(request, num_matched))
        tokens = self.tokens_of(request, num_matched)
        if held is None:
            return -1
        for index in range(0, len(tokens), 4):
            if tokens[index : index + 4] != held[index : index + 4]:
                return num_matched * self._block_size + index // 4
        return -1

    def _parent(self, request: Request, index: int) -> bytes:
        """What the hash of block `index` is chained to."""
        return self.hash_of(request, index - 1) if index else self._root(request.salt)

    def count(self, request: Request, num_matched: int) -> None:
        self.query_tokens += len(request.history) // 4
        self.hit_tokens += num_matched * self._block_size

    def hash_of(self, request: Request, index: int) -> bytes:
        hashes = request.hashes
        if len(hashes) <= index:
            self._extend(request, index + 1)
        return hashes[index]

    def _extend(self, request: Request, count: int) -> None:
        """Compute the request's hashes up to the first `count` blocks."""
        hashes, width = request.hashes, 4 * self._block_size
        history = bytes(request.history[len(hashes) * width : count * width])
        parent = hashes[-1] if hashes else self._root(request.salt)
        for place in range(0, len(history), width):
            parent = block_hash(parent, history[place : place + width])
            hashes.append(parent)

    def _root(self, salt: bytes) -> bytes:
        """Most requests have one of few salts."""
        root = self._roots.get(salt)
        if root is None:
            if len(self._roots) >= KEPT_ROOTS:
                self._roots.clear()
            root = self._roots[salt] = root_hash(salt)
        return root

    def tokens_of(self, request: Request, index: int) -> bytes:
        width = 4 * self._block_size
        return bytes(request.history[index * width : (index + 1) * width])
