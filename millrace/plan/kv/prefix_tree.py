"""The prefix tree as one can look at it: what is cached where, without a token of anybody's text.

A node is a run of blocks that follow each other, with nothing between them that branches and all in one state. Only
blocks of group 0 are shown, the most recently used with all that comes before them. Time and size are bounded: what is
beyond the bounds is counted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from millrace.plan.kv.block_hash import NOBODY
from millrace.plan.kv.block_pool import BlockPool
from millrace.plan.kv.named_blocks import NamedBlocks
from millrace.plan.kv.prefix import PrefixIndex
from millrace.plan.kv.slot_index import SlotIndex
from millrace.plan.planner.block_names import HASH_BYTES, is_first_of
from millrace.plan.planner.protocol import BlockMap, PrefixNode
from millrace.plan.step import Location

MAX_WALKED = 8192
"""Blocks looked at. A path that is begun is looked at whole."""
NAME_BYTES = 4
"""Of a hash, shown as the name of a node or of an owner."""


@dataclass(frozen=True, slots=True)
class _Block:
    location: Location
    state: str
    num_refs: int = 0
    num_hits: int = 0
    used_at: float | None = None


class PrefixTree:
    def __init__(self, pool: BlockPool, tiers: Sequence[SlotIndex], prefix: PrefixIndex, now: float) -> None:
        self._pool, self._tiers, self._prefix, self._now = pool, tiers, prefix, now
        self._places: list[NamedBlocks | SlotIndex] = [pool.named, *tiers]
        self._parents: dict[bytes, bytes | None] = {}
        """Of the blocks looked at. None: not known."""
        self._walk()
        self._children: dict[bytes, list[bytes]] = {}
        tops = []
        for digest, parent in self._parents.items():
            if parent is not None and parent in self._parents:
                self._children.setdefault(parent, []).append(digest)
            else:
                tops.append(digest)
        self._nodes = self._make_nodes(tops)

    def shown(self, max_nodes: int) -> BlockMap:
        """The nodes with most tokens under them; a node is never shown without those before it."""
        nodes = self._nodes
        under = [node.tokens for node in nodes]
        for at in range(len(nodes) - 1, -1, -1):
            if nodes[at].parent >= 0:
                under[nodes[at].parent] += under[at]
        largest = sorted(range(len(nodes)), key=lambda at: (-under[at], at))
        chosen, others = sorted(largest[:max_nodes]), largest[max_nodes:]
        places = {at: place for place, at in enumerate(chosen)}
        states = {"device": self._pool.num_by_state()} | {tier.location: tier.num_by_state() for tier in self._tiers}
        return BlockMap(
            states={str(location): found for location, found in states.items()},
            nodes=[dataclasses.replace(nodes[at], parent=places.get(nodes[at].parent, -1)) for at in chosen],
            other_nodes=len(others),
            other_tokens=sum(nodes[at].tokens for at in others),
            tokens=len(self._parents) * self._prefix.block_size,
            is_whole=not self._is_cut,
        )

    def _walk(self) -> None:
        """Look at blocks, the most recently registered first, and at all that come before each."""
        parents, self._is_cut = self._parents, False
        for digest in self._newest():
            if len(parents) >= MAX_WALKED:
                self._is_cut = True
                return
            while digest not in parents:
                if self._locate(digest) is None:
                    break  # The root, or evicted.
                parent = parents[digest] = self._parent(digest)
                if parent is None:
                    break
                digest = parent

    def _newest(self) -> Iterator[bytes]:
        for place in self._places:
            yield from place.newest()

    def _parent(self, digest: bytes) -> bytes | None:
        return next((found for place in self._places if (found := place.parent_hash(digest)) is not None), None)

    def _locate(self, digest: bytes) -> _Block | None:
        is_kept = digest in self._pool.cached.retained_names
        use = self._pool.use_of(digest)
        if use is None:
            location = next((tier.location for tier in self._tiers if (0, digest) in tier), None)
            return None if location is None else _Block(location, "kept" if is_kept else "cached")
        state = "shared" if use.num_refs > 1 else "in_use" if use.num_refs else "moving" if use.is_moving else ""
        state = state or ("kept" if is_kept else "cached")
        return _Block("device", state, use.num_refs, use.num_hits, use.used_at)

    def _make_nodes(self, tops: list[bytes]) -> list[PrefixNode]:
        """Parents come before their children."""
        nodes: list[PrefixNode] = []
        ahead = [(digest, -1, 0 if self._follows_root(digest) else None) for digest in reversed(tops)]
        while ahead:
            digest, parent, start = ahead.pop()
            node, last = self._run_from(digest, parent, start)
            nodes.append(node)
            end = None if start is None else start + node.tokens
            ahead += [(child, len(nodes) - 1, end) for child in self._children.get(last, [])]
        return nodes

    def _follows_root(self, digest: bytes) -> bool:
        parent = self._parents[digest]
        return parent is not None and (is_first_of(parent) or self._prefix.is_root(parent))

    def _run_from(self, digest: bytes, parent: int, start: int | None) -> tuple[PrefixNode, bytes]:
        """The node that begins with this block, and its last block."""
        first = block = self._locate(digest)
        if first is None or block is None:
            raise AssertionError("a block of the tree is gone")
        last, count, used_at, refs = digest, 1, first.used_at, first.num_refs
        while len(following := self._children.get(last, [])) == 1:
            block = self._locate(following[0])
            if block is None or block.location != first.location or block.state != first.state:
                break
            last, count, refs = following[0], count + 1, max(refs, block.num_refs)
            if used_at is not None and block.used_at is not None:
                used_at = max(used_at, block.used_at)
        node = PrefixNode(
            id=digest[:NAME_BYTES].hex(),
            parent=parent,
            owner="" if digest[HASH_BYTES:] == NOBODY else digest[HASH_BYTES : HASH_BYTES + NAME_BYTES].hex(),
            start=start,
            tokens=count * self._prefix.block_size,
            location=first.location,
            state=first.state,
            refs=refs,
            hits=first.num_hits,
            idle_s=None if used_at is None else round(max(0.0, self._now - used_at), 3),
        )
        return node, last
