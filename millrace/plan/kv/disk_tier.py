"""The disk tier: blocks of the host tier are written to a disk before host memory evicts them, and read back when a
request needs them.

Out: blocks of host memory are written, the oldest first. Host memory never waits for a write: what it evicts before
that is lost.

In: a waiting request whose prefix continues on the disk starts a return: slots of host memory are filled, and the
request, as every other with this prefix, keeps waiting in its place without a row. Then it finds the blocks in host
memory. A return that takes too long is given up, and its tokens are computed.

Reads and writes are issued as batches by `take_copies` and end with `copies_done`. After a failure the disk is left
alone for a while, longer each time.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from millrace.plan.kv.copy_rate import CopyRate
from millrace.plan.kv.host_tier import HostTier, Loading
from millrace.plan.kv.prefix import Match, PrefixIndex
from millrace.plan.kv.slot_index import SlotIndex
from millrace.plan.kv.tier import CacheKey, EvictionCause, Place, Tier
from millrace.plan.planner.block_names import first_of, name_of, read_name
from millrace.plan.request import Diagnostics, Request
from millrace.plan.step import BlockCopies, Location

PATIENCE_S = 5.0
"""Shortest time that a request waits for its blocks, and after which a read in flight is stuck."""
MAX_BATCHES = 4
"""In flight in each direction."""
MAX_SHARE = 1 / 2
"""Share of host memory that one return may take."""
MAX_RETURNS = 16
"""Returns that one waiting request may start."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
RATE_HOLDS_S = 60.0
"""A disk may be slow for a while: after this time without a read its rate is measured anew."""


@dataclass(frozen=True, slots=True)
class DiskTierSettings:
    num_slots: int = 0
    """Blocks that the disk holds; 0 turns the tier off."""


class _Pause:
    """After a failure, the time until the next attempt: twice as long each time."""

    def __init__(self) -> None:
        self._until, self._next_s = 0.0, FIRST_PAUSE_S

    def is_on(self, now: float) -> bool:
        return now < self._until

    def note(self, now: float, failed: bool) -> None:
        if not failed:
            self._next_s = FIRST_PAUSE_S
        elif now >= self._until:
            self._until, self._next_s = now + self._next_s, min(2 * self._next_s, LONGEST_PAUSE_S)


@dataclass(slots=True)
class _Return:
    number: int
    """Negative, as those of arrivals."""
    digests: list[bytes]
    num_tokens: int
    ends_by: float
    noted: Diagnostics
    """Of the request that started it."""
    num_left: int = 0
    failed: bool = False


@dataclass(frozen=True, slots=True)
class _Read:
    owner: _Return
    key: CacheKey
    disk_slot: int
    host_slot: int
    name: bytes


@dataclass(frozen=True, slots=True)
class _Batch:
    began: float
    reads: list[_Read] = field(default_factory=list)
    writes: list[CacheKey] = field(default_factory=list)


class DiskTier:
    def __init__(
        self,
        settings: DiskTierSettings,
        index: SlotIndex,
        host: HostTier,
        prefix: PrefixIndex,
        numbers: Iterator[int],
    ) -> None:
        """`numbers`: of copies and returns."""
        self.settings, self.index = settings, index
        self._host, self._prefix, self._numbers = host, prefix, numbers
        self._unwritten: OrderedDict[CacheKey, None] = OrderedDict()
        """Blocks of host memory that the disk lacks, least recently used first."""
        self._queue: deque[_Read] = deque()
        self._alone: deque[_Read] = deque()
        """Reads of a batch that failed: one by one, they show which block is unreadable."""
        self._in_flight: dict[int, _Batch] = {}
        self._returns: dict[int, _Return] = {}
        self._reads_pause, self._writes_pause = _Pause(), _Pause()
        self._rate, self._rate_at = CopyRate(), 0.0
        self._now = 0.0
        self.tokens_read = 0
        self.blocks_written = 0
        self.reads_failed = self.writes_failed = 0
        """Blocks."""
        self.num_lost = 0
        """Blocks that host memory evicted before they were written."""
        host.index.listeners.append(self)

    @property
    def num_copies(self) -> int:
        """Batches in flight."""
        return len(self._in_flight)

    def restore(self, stored: Iterable[tuple[int, bytes]]) -> None:
        """Blocks that the disk has already, the oldest first: slot and name of each."""
        self.index.restore((slot, *read_name(name)) for slot, name in stored)

    def advance(self, now: float) -> None:
        """Call before each plan."""
        self._now = now
        if self._rate.is_known and now - self._rate_at > RATE_HOLDS_S:
            self._rate.forget()
        for owner in [one for one in self._returns.values() if now > one.ends_by]:
            self._give_up(owner)

    # -- told of host memory ---------------------------------------------------------------------------------------

    def filled(self, tier: Tier, key: CacheKey) -> None:
        if key not in self.index:
            self._unwritten[key] = None

    def used(self, tier: Tier, key: CacheKey) -> None:
        if key not in self.index:
            self._unwritten[key] = None
            self._unwritten.move_to_end(key)
        else:
            self.index.touch(key)

    def evicted(self, tier: Tier, key: CacheKey, cause: EvictionCause) -> None:
        if key in self._unwritten:
            del self._unwritten[key]
            self.num_lost += cause == "room"

    # -- in --------------------------------------------------------------------------------------------------------

    @property
    def is_stuck(self) -> bool:
        """True if a read in flight takes too long."""
        return any(one.reads and self._now - one.began > PATIENCE_S for one in self._in_flight.values())

    def load(self, request: Request, match: Match) -> Loading:
        """Start the return of blocks that continue the request's prefix, of which `match` is on the device."""
        if request.returns >= MAX_RETURNS or not self._may_continue(request, match):
            return "none"
        if self._reads_pause.is_on(self._now) or self.is_stuck:
            return "none"
        host = self._host.index
        longer, without = (self._prefix.match_in(request, tiers) for tiers in ((host, self.index), (host,)))
        found = [place for column in longer for place in column if place is not None]
        num_tokens = (len(longer[0]) - len(without[0])) * self._prefix.block_size
        num_bytes = sum(place.location == "disk" for place in found) * self._host.settings.block_bytes
        waiting_bytes = len(self._queue) * self._host.settings.block_bytes
        read_s = self._rate.seconds(num_bytes + waiting_bytes)
        seconds = read_s + self._host.rate.seconds(num_bytes)
        if num_tokens <= 0 or seconds * self._host.prefill_tokens_per_s > num_tokens:
            return "none"
        ends_by = self._now + max(PATIENCE_S, 2 * read_s)
        end = len(longer[0])
        owner = _Return(
            -1 - next(self._numbers), request.hashes[match.num_columns : end], num_tokens, ends_by, request.diagnostics
        )
        for read in self._reads(owner, request, [list(column) for column in zip(*longer, strict=True)]):
            self.index.pin(read.key)
            self._queue.append(read)
            owner.num_left += 1
        if not owner.num_left:
            return "none"
        self._returns[owner.number] = owner
        self._prefix.expect_arrival(request, match.num_columns, end, owner.number)
        request.returns += 1
        return "started"

    def _may_continue(self, request: Request, match: Match) -> bool:
        """A quick test. With windows the device's match may end where a group lacks an earlier block."""
        first = match.num_columns
        if not self.index.num_used or not self._prefix.has_more(request, first):
            return False
        if self._prefix.has_windows or match.whole is not None:
            return True
        digest, tokens = self._prefix.hash_of(request, first), self._prefix.tokens_of(request, first)
        return any(tier.find(digest, tokens) is not None for tier in (self.index, self._host.index))

    def _reads(self, owner: _Return, request: Request, columns: list[list[Place | None]]) -> Iterator[_Read]:
        """What is on the disk only, first columns first, as far as host memory has room. Takes its slots."""
        host = self._host.index
        left = max(1, int(host.total * MAX_SHARE))
        for at, places in enumerate(columns):
            for group, place in enumerate(places):
                if place is None or place.location == "device":
                    continue
                key = self._prefix.key_of(request, at, group)
                if key in host:  # Perhaps not ready yet.
                    host.touch(key)
                    continue
                tokens = self._prefix.tokens_of(request, at)
                source = self.index.find(key[1], tokens, group)  # Host memory may just have evicted the block.
                parent = self._prefix.parent_of(request, at)
                slot = host.fill(key, tokens, parent) if left and source is not None else None
                if source is None or slot is None:
                    return
                left -= 1
                yield _Read(owner, key, source, slot, self._name_of(key, tokens))

    def _give_up(self, owner: _Return) -> None:
        """Nobody waits any longer. Slots of reads in flight stay taken until these end."""
        self._prefix.end_arrival(owner.digests, owner.number)
        owner.failed, owner.ends_by = True, float("inf")
        for queue in (self._queue, self._alone):
            for read in [one for one in queue if one.owner is owner]:
                queue.remove(read)
                self._end_read(read, is_filled=False, is_readable=True)

    def _end_read(self, read: _Read, *, is_filled: bool, is_readable: bool) -> None:
        owner = read.owner
        self.index.unpin(read.key, failed=not is_readable)
        self._host.index.filled(read.key, failed=not is_filled)
        owner.num_left -= 1
        if owner.num_left == 0:
            del self._returns[owner.number]
            self._prefix.end_arrival(owner.digests, owner.number)
            if not owner.failed:
                self.tokens_read += owner.num_tokens
                owner.noted.read_tokens += owner.num_tokens

    # -- copies ----------------------------------------------------------------------------------------------------

    def take_copies(self) -> list[BlockCopies]:
        """Copies to issue now. Each must end with `copies_done`."""
        issued: list[BlockCopies] = []
        num_in = sum(bool(batch.reads) for batch in self._in_flight.values())
        num_out = len(self._in_flight) - num_in
        while (self._alone or self._queue) and num_in < MAX_BATCHES:
            most = 1 if self._alone else self._host.settings.max_blocks
            queue = self._alone or self._queue
            reads = [queue.popleft() for _ in range(min(len(queue), most))]
            columns = [one.disk_slot for one in reads], [one.host_slot for one in reads]
            batch = _Batch(self._now, reads=reads)
            issued.append(self._issue(batch, "disk", "host", *columns, [one.name for one in reads]))
            num_in += 1
        while num_out < MAX_BATCHES and (copies := self._next_out()) is not None:
            issued.append(copies)
            num_out += 1
        return issued

    def _next_out(self) -> BlockCopies | None:
        if self._writes_pause.is_on(self._now):
            return None
        host, keys, names = self._host.index, [], []
        sources: list[int] = []
        targets: list[int] = []
        for key in self._to_write():
            found = host.read(key)
            slot = self.index.fill(key, found[1], self._parent_of(key)) if found is not None else None
            if found is None or slot is None:
                break
            host.pin(key)
            keys.append(key)
            names.append(self._name_of(key, found[1]))
            sources.append(found[0])
            targets.append(slot)
        for key in keys:
            del self._unwritten[key]
        return self._issue(_Batch(self._now, writes=keys), "host", "disk", sources, targets, names) if keys else None

    def _parent_of(self, key: CacheKey) -> bytes | None:
        """As the disk keeps it: roots are not known after a restart."""
        parent = self._host.index.parent_hash(key[1])
        return first_of(key[1]) if parent is not None and self._prefix.is_root(parent) else parent

    def _name_of(self, key: CacheKey, tokens: bytes) -> bytes:
        """The name under which the block is on the disk, also while it is written."""
        return name_of(key, tokens, self.index.parent_hash(key[1]) if key[0] == 0 else None)

    def _to_write(self) -> list[CacheKey]:
        """The next batch: the oldest blocks first."""
        return list(itertools.islice(self._unwritten, self._host.settings.max_blocks))

    def _issue(
        self,
        batch: _Batch,
        source: Location,
        target: Location,
        blocks: list[int],
        slots: list[int],
        names: list[bytes],
    ) -> BlockCopies:
        columns = np.array(blocks, np.int32), np.array(slots, np.int32)
        copies = BlockCopies(next(self._numbers), source, target, *columns, tuple(names))
        self._in_flight[copies.copies_no] = batch
        return copies

    def copies_done(self, copies: BlockCopies, failed: bool, seconds: float) -> None:
        batch = self._in_flight.pop(copies.copies_no)
        self._end_writes(batch.writes, failed)
        if not batch.reads:
            return
        if failed and len(batch.reads) > 1:
            given_up = [one for one in batch.reads if one.owner.failed]
            self._alone.extend(one for one in batch.reads if not one.owner.failed)
            for read in given_up:
                self._end_read(read, is_filled=False, is_readable=True)
            return
        self._reads_pause.note(self._now, failed)
        if failed:
            self.reads_failed += 1
        else:
            self._rate.add(len(batch.reads) * self._host.settings.block_bytes, seconds)
            self._rate_at = self._now
        for read in batch.reads:
            if failed and not read.owner.failed:
                self._give_up(read.owner)
            self._end_read(read, is_filled=not failed, is_readable=not failed)

    def _end_writes(self, keys: list[CacheKey], failed: bool) -> None:
        if not keys:
            return
        self._writes_pause.note(self._now, failed)
        for key in keys:
            self.index.filled(key, failed)
            self._host.index.unpin(key, failed=False)
            if failed and key in self._host.index:
                self._unwritten[key] = None
        if failed:
            self.writes_failed += len(keys)
        else:
            self.blocks_written += len(keys)

    def check(self) -> None:
        """For tests: what is unwritten is in host memory and not on the disk."""
        self.index.check()
        for key in self._unwritten:
            if key in self.index or key not in self._host.index:
                raise AssertionError("a block is unwritten that is on the disk, or not in host memory")
