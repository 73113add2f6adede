"""Finds cached prefixes of requests, and prefixes that a running request is computing right now."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import TypeVar

from millrace.plan.divergence import Divergence
from millrace.plan.kv.block_hash import block_hash, block_hashes, root_hash
from millrace.plan.kv.block_pool import BlockPool
from millrace.plan.kv.groups import ONE_GROUP, KvGroups, first_visible_column
from millrace.plan.kv.states.checkpoints import Checkpoints
from millrace.plan.kv.tier import CacheKey, Place, Tier
from millrace.plan.request import Request

MAX_ROOTS = 1024
"""Root hashes kept, one per salt."""

CHILDREN_COMPARED = 32
"""Cached blocks after the same prefix, the last filled first, among which the most similar one is sought."""

P = TypeVar("P")
Find = Callable[[bytes, bytes, int], P | None]
"""Hash, tokens and KV group of a block to where it is, or None."""
Columns = list[list[P | None]]
"""By group, where each block of a prefix is, all of one length; None in columns behind the group's window."""


@dataclass(slots=True)  # Never modified, but a frozen dataclass takes several times as long to create.
class Match:
    """The cached blocks with which a request begins."""

    blocks: list[list[int]]
    """By group, all of one length; 0 in columns behind the group's window, which no token will read."""
    whole: Match | None = None
    """If cached blocks go on where no recurrent state was kept: the match without regard to states."""

    @property
    def num_columns(self) -> int:
        return len(self.blocks[0])

    @property
    def num_reached(self) -> int:
        """Columns whose blocks are cached, states or not."""
        return self.num_columns if self.whole is None else self.whole.num_columns

    @property
    def found(self) -> list[int]:
        """All blocks of the match."""
        return [block for blocks in self.blocks for block in blocks if block]


class PrefixIndex:
    """Matches full blocks by their chained hash. At least one token of a request is always left to compute."""

    def __init__(self, pool: BlockPool, block_size: int, enabled: bool, groups: KvGroups = ONE_GROUP) -> None:
        self._pool = pool
        self._groups = groups
        self.block_size = block_size
        self._enabled = enabled
        self.has_windows = bool(groups.windowed)
        self.checkpoints: Checkpoints | None = None
        """Of recurrent states. None: the model has none, and blocks are all that a prefix needs."""
        self._pending: dict[bytes, int] = {}
        """Hash of each block being computed from known tokens, to the id of the running request that computes it.
        For a block that arrives from host memory, the number of its arrival, which is negative."""
        self._expected: list[tuple[Request, int, int]] = []
        """Requests with the range of their blocks that belongs in `_pending` but is not hashed yet. Hashing a long
        prompt takes time and is not needed before the next request is matched."""
        self._compared: dict[bytes, list[bytes]] = {}
        """By hash of a block: tokens of those after it, found for a request of the same step."""
        self._roots: dict[bytes, bytes] = {}
        self.query_tokens = 0
        self.hit_tokens = 0

    def match(self, request: Request) -> Match:
        """The longest prefix of the request's tokens that every group can supply, and that a recurrent state was kept
        for if the model has some. Takes no reference."""
        if not (self._enabled and request.read_cache):
            return Match([[] for _ in self._groups.windows])
        if not self.has_windows:
            return self._to_checkpoint(request, Match([self._match_full(request)]))
        found = self._match_groups(request, self._pool.named.find)
        return Match([[block or 0 for block in blocks] for blocks in found])

    def _to_checkpoint(self, request: Request, match: Match) -> Match:
        """The part of the match that ends where a recurrent state was kept."""
        if self.checkpoints is None:
            return match
        num_columns = self.checkpoints.longest(request, match.num_columns)
        if num_columns == match.num_columns:
            return match
        return Match([blocks[:num_columns] for blocks in match.blocks], match)

    def match_in(self, request: Request, tiers: Sequence[Tier]) -> Columns[Place]:
        """The longest prefix that the device and these tiers can supply together: of each block the first place."""

        def find(digest: bytes, tokens: bytes, group: int) -> Place | None:
            block = self._pool.named.find(digest, tokens, group)
            if block is not None:
                return Place("device", block)
            for tier in tiers:
                slot = tier.find(digest, tokens, group)
                if slot is not None:
                    return Place(tier.location, slot)
            return None

        found = self._match_groups(request, find)
        if self.checkpoints is None:
            return found
        num_columns = self.checkpoints.longest(request, len(found[0]))
        return [places[:num_columns] for places in found]

    def key_of(self, request: Request, column: int, group: int) -> CacheKey:
        return group, self.hash_of(request, column)

    def _match_full(self, request: Request) -> list[int]:
        """The longest run of cached blocks of group 0."""
        blocks: list[int] = []
        usable = (len(request.history) // 4 - 1) // self.block_size
        pool, history, width = self._pool, bytes(request.history), 4 * self.block_size
        hashes, parent = request.hashes, self._root(request.salt)
        for index in range(usable):
            if index < len(hashes):
                parent, tokens = hashes[index], request.block_tokens[index]
            else:
                tokens = history[index * width : (index + 1) * width]
                # Usually the last registered child of this prefix matches, which saves computing a hash.
                child = pool.named.find_child(blocks[-1] if blocks else 0, parent, tokens)
                parent = child[1] if child is not None else block_hash(parent, tokens)
                hashes.append(parent)
                request.block_tokens.append(tokens)
                if child is not None:
                    blocks.append(child[0])
                    continue
            found = pool.named.find(parent, tokens)
            if found is None:
                break
            blocks.append(found)
        return blocks

    def _match_groups(self, request: Request, find: Find[P]) -> Columns[P]:
        """The longest prefix of which full groups have all blocks, and groups with a window those that it covers."""
        usable, size, windows = (
            (len(request.history) // 4 - 1) // self.block_size,
            self.block_size,
            self._groups.windows,
        )
        found: Columns[P] = [[] for _ in windows]
        has_full = self._groups.num_full > 0
        for index in range(usable):
            digest, tokens = self.hash_of(request, index), self.tokens_of(request, index)
            for group, blocks in enumerate(found):
                blocks.append(find(digest, tokens, group))
            if has_full and any(found[group][-1] is None for group, window in enumerate(windows) if window is None):
                break
        length = len(found[0])
        while length and not all(
            self._supplies(blocks, length, window) for blocks, window in zip(found, windows, strict=True)
        ):
            length -= 1
        return [_visible(blocks[:length], length, window, size) for blocks, window in zip(found, windows, strict=True)]

    def _supplies(self, blocks: Sequence[object], length: int, window: int | None) -> bool:
        """True if the group has every block that a token after `length` blocks can see."""
        first = 0 if window is None else first_visible_column(length * self.block_size, window, self.block_size)
        return None not in blocks[first:length]

    def blocks_of_text(self, request: Request, start: int, num_full: int) -> list[int]:
        """The cached blocks of the tokens from position `start` of its prompt on, as if they began a prompt: the first
        ones, at most `num_full`. Takes no reference."""
        blocks: list[int] = []
        for digest, tokens in self._text(request, start, num_full) if self._enabled else ():
            block = self._pool.named.find(digest, tokens)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def awaits_text(self, request: Request, start: int, index: int) -> bool:
        """True if block `index` of that text is being computed or arriving: the request waits for it."""
        self.hash_expected()
        digest = self._text(request, start, index + 1)[index][0]
        if digest in self._pending:
            request.held_by = digest
        return digest in self._pending

    def _text(self, request: Request, start: int, num_full: int) -> list[tuple[bytes, bytes]]:
        """Hashes and tokens of the first blocks of a text inside the prompt."""
        found = request.text_blocks.setdefault(start, [])
        parent = found[-1][0] if found else self._root(request.salt)
        for index in range(len(found), num_full):
            first = start + index * self.block_size
            tokens = request.prompt[first : first + self.block_size].tobytes()
            parent = block_hash(parent, tokens)
            found.append((parent, tokens))
        return found[:num_full]

    def must_wait(self, request: Request, match: Match) -> bool:
        """True if a running request is computing the first block that was not found, or a state after blocks that were,
        or if that block is arriving."""
        request.held_by = None
        if self.has_more(request, match.num_reached):
            self.hash_expected()
            digest = self.hash_of(request, match.num_reached)
            request.held_by = digest if digest in self._pending else None
        if request.held_by is None and match.whole is not None and self.checkpoints is not None:
            request.held_by = self.checkpoints.awaited(request, match.num_columns, match.num_reached)
        return request.held_by is not None

    def num_expected(self, request: Request, others: Container[bytes]) -> int:
        """Leading blocks of the request that are cached, being computed, or whose hashes are among `others`. Hashes
        all its full blocks."""
        if not (self._enabled and request.read_cache):
            return 0
        self.hash_expected()
        usable = (len(request.history) // 4 - 1) // self.block_size
        if usable:
            self.hash_of(request, usable - 1)
        for index, digest in enumerate(request.hashes[:usable]):
            is_known = digest in self._pending or digest in others
            if not is_known and self._pool.named.find(digest, request.block_tokens[index]) is None:
                return index
        return usable

    def has_more(self, request: Request, num_matched: int) -> bool:
        """True if the cache may hold more of the request than the first `num_matched` blocks."""
        usable = (len(request.history) // 4 - 1) // self.block_size
        return self._enabled and request.read_cache and num_matched < usable

    def is_held(self, request: Request) -> bool:
        """True if the block that `must_wait` found is still being computed or arriving."""
        if request.held_by is None:
            return False
        self.hash_expected()
        is_state = self.checkpoints is not None and self.checkpoints.is_expected(request.held_by)
        return is_state or request.held_by in self._pending

    def expect(self, request: Request, num_matched: int) -> None:
        """The request was admitted: its known full blocks, after the matched ones, are being computed."""
        if not self._enabled:
            return
        num_full = min(len(request.history) // 4, request.exact_end) // self.block_size
        if num_full > num_matched:
            self._expected.append((request, num_matched, num_full))

    def expect_arrival(self, request: Request, first: int, end: int, arrival: int) -> None:
        """These blocks of the request arrive from host memory: it waits for them, as others with the same prefix do."""
        request.held_by = request.hashes[first]
        for digest in request.hashes[first:end]:
            self._pending.setdefault(digest, arrival)

    def end_arrival(self, digests: list[bytes], arrival: int) -> None:
        """The arrival of these blocks ended, or nobody waits for it any longer."""
        for digest in digests:
            if self._pending.get(digest) == arrival:
                del self._pending[digest]

    def hash_expected(self) -> None:
        """Hash the blocks that `expect` deferred. Every method that reads `_pending` calls this first."""
        if not self._expected:
            return
        expected, self._expected = self._expected, []
        for request, first, end in expected:
            self.hash_of(request, end - 1)
            for digest in request.hashes[first:end]:
                self._pending.setdefault(digest, request.id)

    def forget(self, request: Request) -> None:
        """The request leaves its row: blocks it has not filled are no longer being computed."""
        self.hash_expected()
        pending = self._pending
        for digest in request.hashes if pending else ():
            if pending.get(digest) == request.id:
                del pending[digest]

    def register_blocks(self, request: Request, first: int, groups: list[list[int]]) -> None:
        """Register blocks, by group, that are filled and confirmed, from the request's column `first` on."""
        if not self._enabled or not groups[0]:
            return
        self.hash_expected()
        end, pending = first + len(groups[0]), self._pending
        parent = self.parent_of(request, first)
        self.hash_of(request, end - 1)
        hashes, tokens = request.hashes[first:end], request.block_tokens[first:end]
        for group, blocks in enumerate(groups):
            self._pool.named.register(blocks, hashes, tokens, parent, group)
        for digest in hashes if pending else ():
            if pending.get(digest) == request.id:
                del pending[digest]

    def begin_admitting(self) -> None:
        """Requests of one step are admitted next."""
        self._compared.clear()

    def note_divergence(self, request: Request, match: Match) -> None:
        """Note which cached blocks follow the match, for the question where the prompt differs from the one with which
        most tokens agree."""
        if not (self._enabled and request.read_cache):
            return
        match = match.whole or match
        num_matched, blocks = match.num_columns, match.blocks[0]
        parent, before = self.parent_of(request, num_matched), blocks[-1] if blocks else 0
        cached = self._compared.get(parent)
        if cached is None:
            cached = self._pool.named.tokens_of_children(before, parent, CHILDREN_COMPARED)
            self._compared[parent] = cached
        if cached:
            start, size = num_matched * self.block_size, self.block_size
            request.diagnostics.divergence = Divergence(bytes(request.history), start, size, cached)

    def parent_of(self, request: Request, index: int) -> bytes:
        """The parent hash of block `index`."""
        return self.hash_of(request, index - 1) if index else self._root(request.salt)

    def count(self, request: Request, num_matched: int) -> None:
        """Count an admission in the hit rate."""
        self.query_tokens += len(request.history) // 4
        self.hit_tokens += num_matched * self.block_size

    def hash_of(self, request: Request, index: int) -> bytes:
        hashes = request.hashes
        if len(hashes) <= index:
            self._extend(request, index + 1)
        return hashes[index]

    def _extend(self, request: Request, count: int) -> None:
        """Compute the hashes of the first `count` blocks."""
        hashes, width = request.hashes, 4 * self.block_size
        history = bytes(request.history[len(hashes) * width : count * width])
        parent = hashes[-1] if hashes else self._root(request.salt)
        added = [history[start : start + width] for start in range(0, len(history), width)]
        hashes += block_hashes(parent, added)
        request.block_tokens += added

    def _root(self, salt: bytes) -> bytes:
        """The root hash of a salt, cached because few salts are in use."""
        root = self._roots.get(salt)
        if root is None:
            if len(self._roots) >= MAX_ROOTS:
                self._roots.clear()
            root = self._roots[salt] = root_hash(salt)
        return root

    def is_root(self, digest: bytes) -> bool:
        """True if first blocks follow this hash, as far as its salt was in use lately."""
        return digest in self._roots.values()

    def tokens_of(self, request: Request, index: int) -> bytes:
        """The tokens of block `index`, all that are known if it is not full."""
        if index < len(request.block_tokens):
            return request.block_tokens[index]
        width = 4 * self.block_size
        return bytes(request.history[index * width : (index + 1) * width])


def _visible(places: list[P | None], length: int, window: int | None, block_size: int) -> list[P | None]:
    """The places of blocks that tokens after the prefix can see; None in the columns before them."""
    first = 0 if window is None else first_visible_column(length * block_size, window, block_size)
    return [None if index < first else place for index, place in enumerate(places)]
