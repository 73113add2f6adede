"""The host tier: cached blocks are copied to host memory before they are evicted, and loaded when a request needs them.

Out: while few blocks are free or have a copy in host memory, the oldest dirty blocks are copied out. A block that is
being copied is held, so nothing reuses it before the copy is acknowledged.

In: a waiting request whose prefix continues in host memory starts an arrival: blocks are allocated and held, and their
hashes count as pending, as those that a running request computes. The request, and every other with this prefix, keeps
waiting in its place without a row. Once all copies are acknowledged, it finds the blocks like any other prefix. An
arrival does not depend on the request that started it, which may be aborted.

Copies are issued in batches, a few at a time, by `take_copies`, and end with `copies_done`. If they take too long, the
tier is stuck: requests compute what they waited for, and dirty blocks are evicted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from millrace.plan.kv.block_pool import BlockPool
from millrace.plan.kv.copy_rate import CopyRate
from millrace.plan.kv.prefix import Columns, Match, PrefixIndex
from millrace.plan.kv.slot_index import SlotIndex
from millrace.plan.kv.tier import CacheKey, Place, Tier
from millrace.plan.request import Diagnostics, Request
from millrace.plan.step import BlockCopies, Location

PATIENCE_S = 10.0
"""A tier with a copy in flight for longer than this is stuck."""
MAX_BATCHES = 4
"""Batches in flight in each direction. They are acknowledged once per step, so a step's time should be filled."""
CLEAN_SHARE = 1 / 8
"""Share of the pool that is kept free or clean, at least."""
MAX_LOADS = 4
"""Arrivals that one waiting request may start. If its blocks are evicted before it is admitted, it loads them again."""

Loading = Literal["none", "started", "blocked"]
"""What became of a request: nothing is worth loading, its blocks are arriving, or they find no room on the device."""


@dataclass(frozen=True, slots=True)
class HostTierSettings:
    num_slots: int = 0
    """Blocks that host memory holds; 0 turns the tier off."""
    block_bytes: int = 1
    batch_bytes: int = 4 << 20
    """Maximum size of a batch of copies."""

    @property
    def max_blocks(self) -> int:
        """Maximum number of blocks in a batch."""
        return max(1, self.batch_bytes // self.block_bytes)


@dataclass(slots=True)
class _Arrival:
    number: int
    """Negative: tells arrivals from requests."""
    digests: list[bytes]
    """Hashes of the columns that requests wait for."""
    num_left: int
    """Copies that have not ended."""
    num_tokens: int
    """Tokens that need not be computed."""
    held: list[int]
    """All its blocks, those found on the device included, last column first."""
    noted: Diagnostics
    """Of the request that started it."""
    failed: bool = False


@dataclass(frozen=True, slots=True)
class _Load:
    """A block that arrives."""

    arrival: _Arrival
    key: CacheKey
    block: int
    slot: int
    tokens: bytes
    parent: bytes


@dataclass(frozen=True, slots=True)
class _Batch:
    began: float
    loads: list[_Load] = field(default_factory=list)
    leaving: list[tuple[int, CacheKey]] = field(default_factory=list)
    """Blocks that leave, with their names in host memory."""


class HostTier:
    def __init__(
        self,
        settings: HostTierSettings,
        index: SlotIndex,
        pool: BlockPool,
        prefix: PrefixIndex,
        most_per_step: int,
        numbers: Iterator[int],
        below: Tier | None = None,
    ) -> None:
        """`most_per_step`: blocks that one step may take. `numbers`: of copies and arrivals. `below`: a tier that keeps
        what is evicted here; blocks move towards it while nothing runs."""
        self.settings, self.index = settings, index
        self._numbers, self._below = numbers, below
        self.is_idle = False
        self._pool, self._prefix = pool, prefix
        self._num_clean = max(most_per_step, int(pool.total * CLEAN_SHARE))
        """Blocks to keep free or clean. At least what a step may take, so waiting for blocks always ends."""
        self._num_wanted = 0
        """Blocks that must be available for an arrival that found no room."""
        self._queue: deque[_Load] = deque()
        self._in_flight: dict[int, _Batch] = {}
        self._arrivals: dict[int, _Arrival] = {}
        self._now = 0.0
        self.is_stuck = False
        self.rate = CopyRate()
        self.prefill_tokens_per_s = 0.0
        """Measured rate of computing prompts, which the engine keeps up to date; 0 if unknown."""
        self.tokens_loaded = 0
        self.copies_failed = 0
        """Blocks that failed to be copied, in either direction."""

    @property
    def num_copies(self) -> int:
        """Batches in flight."""
        return len(self._in_flight)

    def advance(self, now: float, is_idle: bool = False) -> None:
        """Call before each plan: finds out whether copies are stuck. `is_idle`: no request waits or runs."""
        self._now, self.is_idle = now, is_idle
        self._num_wanted = 0
        oldest = next(iter(self._in_flight.values()), None)
        was_stuck, self.is_stuck = self.is_stuck, oldest is not None and now - oldest.began > PATIENCE_S
        self._pool.withholds_dirty = not self.is_stuck
        if self.is_stuck and not was_stuck:
            self._abandon_arrivals()

    # -- in --------------------------------------------------------------------------------------------------------

    def load(self, request: Request, match: Match) -> Loading:
        """Start the arrival of blocks that continue the request's prefix, of which `match` is on the device."""
        if self.is_stuck or request.loads >= MAX_LOADS or not self._may_continue(request, match):
            return "none"
        longer = self._prefix.match_in(request, (self.index,))
        places = [place for column in longer for place in column if place is not None]
        found = [place.at for place in places if place.location == "device"]
        num_missing = len(places) - len(found)
        num_tokens = (len(longer[0]) - match.num_columns) * self._prefix.block_size
        if num_tokens <= 0 or not self._pays(num_missing, num_tokens):
            return "none"
        self._pool.hold(found)
        num_lacking = num_missing - self._pool.num_available
        if num_lacking > 0:
            self._pool.unhold(reversed(found))
            self._num_wanted = max(self._num_wanted, self._pool.num_available + num_lacking)
            return "blocked"
        self._start(request, match.num_columns, longer, num_tokens, num_missing)
        return "started"

    def _may_continue(self, request: Request, match: Match) -> bool:
        """A quick test. With windows the device's match may end where a group lacks an earlier block."""
        first = match.num_columns
        if not self._prefix.has_more(request, first):
            return False
        if self._prefix.has_windows or match.whole is not None:
            return True
        return self.index.find(self._prefix.hash_of(request, first), self._prefix.tokens_of(request, first)) is not None

    def _pays(self, num_blocks: int, num_tokens: int) -> bool:
        """True if loading beats computing, or if nothing was measured yet. Copies that are queued come first."""
        num_bytes = (len(self._queue) + num_blocks) * self.settings.block_bytes
        return self.rate.seconds(num_bytes) * self.prefill_tokens_per_s <= num_tokens

    def _start(self, request: Request, first: int, longer: Columns[Place], num_tokens: int, num_missing: int) -> None:
        """Allocate blocks for what is missing and queue its copies, first columns first."""
        end, free = len(longer[0]), iter(self._pool.take_held(num_missing))
        arrival = _Arrival(
            -1 - next(self._numbers), request.hashes[first:end], num_missing, num_tokens, [], request.diagnostics
        )
        for column in range(end):
            tokens, parent = self._prefix.tokens_of(request, column), self._prefix.parent_of(request, column)
            for group, places in enumerate(longer):
                place = places[column]
                if place is None:
                    continue
                if place.location == "device":
                    arrival.held.append(place.at)
                    continue
                key, block = self._prefix.key_of(request, column, group), next(free)
                self.index.pin(key)
                self._queue.append(_Load(arrival, key, block, place.at, tokens, parent))
                arrival.held.append(block)
        arrival.held.reverse()
        self._arrivals[arrival.number] = arrival
        self._prefix.expect_arrival(request, first, end, arrival.number)
        request.loads += 1

    def _end_load(self, load: _Load, failed: bool, is_readable: bool = True) -> None:
        arrival = load.arrival
        failed = failed or self.index.read(load.key) is None  # It was forgotten meanwhile.
        self.index.touch(load.key)
        self.index.unpin(load.key, failed=not is_readable)
        if failed:
            arrival.failed = True
        else:
            group, digest = load.key
            self._pool.named.register([load.block], [digest], [load.tokens], load.parent, group)
        arrival.num_left -= 1
        if arrival.num_left == 0:
            del self._arrivals[arrival.number]
            self._prefix.end_arrival(arrival.digests, arrival.number)
            self._pool.unhold(arrival.held)
            if not arrival.failed:
                self.tokens_loaded += arrival.num_tokens
                arrival.noted.loaded_tokens += arrival.num_tokens

    def _abandon_arrivals(self) -> None:
        """Nobody waits for copies any longer. Blocks of copies in flight stay held until they are acknowledged."""
        for arrival in self._arrivals.values():
            self._prefix.end_arrival(arrival.digests, arrival.number)
        while self._queue:
            self._end_load(self._queue.popleft(), failed=True)

    # -- copies ----------------------------------------------------------------------------------------------------

    def take_copies(self) -> list[BlockCopies]:
        """Copies to issue now. Each must end with `copies_done`."""
        if self.is_stuck:
            return []
        issued = []
        num_in = sum(bool(batch.loads) for batch in self._in_flight.values())
        num_out = len(self._in_flight) - num_in
        while self._queue and num_in < MAX_BATCHES:
            loads = [self._queue.popleft() for _ in range(min(len(self._queue), self.settings.max_blocks))]
            blocks, slots = [load.block for load in loads], [load.slot for load in loads]
            issued.append(self._issue(_Batch(self._now, loads=loads), "host", "device", slots, blocks))
            num_in += 1
        while num_out < MAX_BATCHES and (copies := self._next_out()) is not None:
            issued.append(copies)
            num_out += 1
        return issued

    def _next_out(self) -> BlockCopies | None:
        """A batch of the oldest dirty blocks, as many as clean ones are lacking."""
        pool = self._pool
        num_coming = sum(len(batch.leaving) for batch in self._in_flight.values())
        num_lacking = self._num_clean + self._num_wanted - pool.num_available - num_coming
        is_spare = num_lacking <= 0 and self._below is not None and self.is_idle
        leaving, blocks, slots = [], [], []
        for _ in range(self.settings.max_blocks if is_spare else min(num_lacking, self.settings.max_blocks)):
            if is_spare and not self._has_spare_slot():
                break
            oldest = pool.cached.oldest_dirty()
            if oldest is None:
                break
            block, key, tokens = oldest
            slot = self.index.fill(key, tokens, pool.named.parent_hash(key[1]))
            if slot is None:
                break
            pool.hold([block])
            leaving.append((block, key))
            blocks.append(block)
            slots.append(slot)
        batch = _Batch(self._now, leaving=leaving)
        return self._issue(batch, "device", "host", blocks, slots) if blocks else None

    def _has_spare_slot(self) -> bool:
        """True if a slot is free, or if the tier below has what would be evicted."""
        if self.index.num_free:
            return True
        oldest = self.index.next_evicted()
        return oldest is not None and self._below is not None and oldest in self._below

    def _issue(
        self, batch: _Batch, source: Location, target: Location, blocks: list[int], slots: list[int]
    ) -> BlockCopies:
        columns = np.array(blocks, np.int32), np.array(slots, np.int32)
        copies = BlockCopies(next(self._numbers), source, target, *columns)
        self._in_flight[copies.copies_no] = batch
        return copies

    def copies_done(self, copies: BlockCopies, failed: bool, seconds: float) -> None:
        batch = self._in_flight.pop(copies.copies_no)
        if failed:
            self.copies_failed += len(copies.blocks)
        else:
            self.rate.add(len(copies.blocks) * self.settings.block_bytes, seconds)
        for load in batch.loads:
            self._end_load(load, failed, is_readable=not failed)
        for block, key in batch.leaving:
            self.index.filled(key, failed)
            self._pool.unhold([block])
            if failed:
                self._pool.cached.give_up(block)
