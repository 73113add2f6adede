"""Policies of eviction on a recorded trace: the real block pool, without steps or a model.

A block is one of the trace's: 512 tokens. Requests come in the order of the trace; the last `NUM_OPEN` of them hold
their blocks. What a policy saves is counted in tokens found, and in time: a token at position p takes
1 + p / `EVEN_AT` times as long as the first, about as on an 8B model with grouped heads.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from millrace.bench.errors import BenchError
from millrace.bench.figures import Figure
from millrace.config import EvictionName
from millrace.load.sources import TracedRequest, read_trace
from millrace.load.workload import BLOCK_TOKENS
from millrace.plan.kv.block_hash import block_hash, root_hash
from millrace.plan.kv.block_pool import BlockPool
from millrace.plan.kv.eviction import EvictionSettings

NUM_OPEN = 16
EVEN_AT = 30_000
"""Position at which attention to the tokens before takes as long as the rest."""
COLUMN_COST = BLOCK_TOKENS / EVEN_AT
POLICIES: tuple[EvictionName, ...] = get_args(EvictionName)
POOLS = (1_000_000, 4_000_000, 16_000_000)
"""Tokens of the pool; it is larger if the open requests need more."""


@dataclass(frozen=True, slots=True)
class Replayed:
    policy: EvictionName
    pool_tokens: int
    found: float
    """Share of the blocks that were found."""
    saved: float
    """Share of the time to compute all blocks that finding them saved."""
    evictions: int
    us_per_block: float
    """Host time of the pool for each block."""


def eviction_figures(trace: Path, pools: Sequence[int] = ()) -> Iterator[Figure]:
    requests = [one for one in read_trace(trace) if one.blocks]
    if not requests:
        raise BenchError(f"The requests of {trace} have no hash_ids, so nothing tells which prefixes are equal.")
    for pool_tokens in pools or POOLS:
        for policy in POLICIES:
            done = replay(requests, policy, pool_tokens)
            note = f"saves {done.saved:.1%} of the time; {done.evictions:,} evictions; {done.us_per_block:.2f} µs/block"
            yield Figure(f"{pool_tokens:,} tokens", policy, 100 * done.found, "%", note=note)


def replay(requests: Sequence[TracedRequest], policy: EvictionName, pool_tokens: int) -> Replayed:
    longest = max(len(one.blocks) for one in requests)
    num_blocks = max(pool_tokens // BLOCK_TOKENS, (NUM_OPEN + 1) * longest)
    pool = BlockPool(num_blocks, eviction=EvictionSettings(policy, COLUMN_COST))
    root, names = root_hash(b""), BlockNames()
    open_rows: deque[list[int]] = deque()
    num_found, num_all, saved_s, all_s = 0, 0, 0.0, 0.0
    chains = [names.chain(root, one.blocks) for one in requests]
    began = time.perf_counter()
    for digests, contents in chains:
        found: list[int] = []
        for digest, content in zip(digests, contents, strict=True):
            block = pool.named.find(digest, content)
            if block is None:
                break
            found.append(block)
        pool.share(found)
        first = len(found)
        row = found + pool.take_many(len(digests) - first)
        pool.named.register(row[first:], digests[first:], contents[first:], digests[first - 1] if first else root)
        open_rows.append(row)
        if len(open_rows) > NUM_OPEN:
            pool.release(reversed(open_rows.popleft()), None)
        num_found, num_all = num_found + first, num_all + len(row)
        saved_s, all_s = saved_s + _seconds(first), all_s + _seconds(len(row))
    seconds = time.perf_counter() - began
    return Replayed(
        policy, pool_tokens, num_found / num_all, saved_s / all_s, pool.num_evicted, 1e6 * seconds / num_all
    )


def _seconds(num_blocks: int) -> float:
    """Time of a prompt's first blocks, in that of one block without any before."""
    return num_blocks + COLUMN_COST * num_blocks * (num_blocks - 1) / 2


class BlockNames:
    """Chained hashes of the trace's blocks, and what stands for their tokens."""

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, int], bytes] = {}

    def chain(self, root: bytes, ids: Sequence[int]) -> tuple[list[bytes], list[bytes]]:
        digests, contents, parent = [], [], root
        for number in ids:
            content = number.to_bytes(8, "little")
            digest = self._known.get((parent, number))
            if digest is None:
                digest = self._known[parent, number] = block_hash(parent, content)
            digests.append(digest)
            contents.append(content)
            parent = digest
        return digests, contents
