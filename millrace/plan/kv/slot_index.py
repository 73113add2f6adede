"""The index of a tier: slots of one block each, found by cache key.

Every slot is in exactly one of four states, and the equation always holds:
    free + ready + filling + pinned = total
  free     has no content worth keeping
  ready    can be loaded; evicted in least-recently-used order
  filling  a copy writes it
  pinned   a copy reads it; it keeps its place in the order
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from millrace.plan.kv.tier import CacheKey, EvictionCause, TierListener
from millrace.plan.planner.journal import KvJournal
from millrace.plan.step import Location


class SlotIndex:
    """A `Tier`."""

    def __init__(self, location: Location, num_slots: int) -> None:
        self.location, self.total = location, num_slots
        self.listeners: list[TierListener] = []
        self.journal: KvJournal | None = None
        """Notes the blocks of group 0; None while nobody reads it."""
        self.num_evicted: dict[EvictionCause, int] = {"room": 0, "failed": 0, "forgotten": 0}
        self._free = list(range(num_slots - 1, -1, -1))
        self._order: OrderedDict[CacheKey, None] = OrderedDict()
        """Ready and pinned blocks, the least recently used first."""
        self._filling: set[CacheKey] = set()
        self._pins: dict[CacheKey, int] = {}
        """Number of copies that read each pinned slot."""
        self._slot_of: dict[CacheKey, int] = {}
        self._parent_of: dict[bytes, bytes] = {}
        """Hash of the block before each block of group 0, as far as known."""
        self._tokens_of: dict[CacheKey, bytes | None] = {}
        """None if the content is unreadable or forgotten: the entry is dropped once no copy uses it."""

    @property
    def num_used(self) -> int:
        return self.total - len(self._free)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def next_evicted(self) -> CacheKey | None:
        """The block that makes room for the next one, once no slot is free."""
        return next((key for key in self._order if key not in self._pins), None)

    def __contains__(self, key: CacheKey) -> bool:
        return key in self._slot_of

    def find(self, digest: bytes, tokens: bytes, group: int = 0) -> int | None:
        key = (group, digest)
        if self._tokens_of.get(key) != tokens or key in self._filling:
            return None
        return self._slot_of[key]

    def read(self, key: CacheKey) -> tuple[int, bytes] | None:
        """Slot and tokens of a block that can be loaded."""
        tokens = self._tokens_of.get(key)
        return None if tokens is None or key in self._filling else (self._slot_of[key], tokens)

    def touch(self, key: CacheKey) -> None:
        if key in self._order:
            self._order.move_to_end(key)
        if key in self._slot_of:
            for listener in self.listeners:
                listener.used(self, key)

    def fill(self, key: CacheKey, tokens: bytes, parent: bytes | None = None) -> int | None:
        if key in self._slot_of:
            raise AssertionError(f"the block is in {self.location} already")
        if not self._free:
            oldest = self.next_evicted()
            if oldest is None:
                return None
            self._drop(oldest, "room")
        slot = self._free.pop()
        self._slot_of[key], self._tokens_of[key] = slot, tokens
        if parent is not None and key[0] == 0:
            self._parent_of[key[1]] = parent
        self._filling.add(key)
        return slot

    def filled(self, key: CacheKey, failed: bool) -> None:
        self._filling.remove(key)
        self._order[key] = None
        if failed or self._tokens_of[key] is None:
            self._drop(key, "failed" if failed else "forgotten")
            return
        if self.journal is not None and key[0] == 0:
            self.journal.note("filled", self.location, key[1])
        for listener in self.listeners:
            listener.filled(self, key)

    def pin(self, key: CacheKey) -> None:
        self._pins[key] = self._pins.get(key, 0) + 1

    def unpin(self, key: CacheKey, failed: bool) -> None:
        if failed:
            self._tokens_of[key] = None
        self._pins[key] -= 1
        if self._pins[key] == 0:
            del self._pins[key]
            if self._tokens_of[key] is None:
                self._drop(key, "failed")

    def forget(self, mark: bytes) -> int:
        """Drop the blocks of the owner with this mark; those that copies use once these have ended. Returns how many
        blocks there were."""
        keys = [key for key in self._slot_of if key[1].endswith(mark)]
        for key in keys:
            if key in self._filling or key in self._pins:
                self._tokens_of[key] = None
            else:
                self._drop(key, "forgotten")
        return len(keys)

    def restore(self, entries: Iterable[tuple[int, CacheKey, bytes, bytes | None]]) -> None:
        """Blocks that slots hold already, least recently used first: slot, key, tokens and parent of each."""
        for slot, key, tokens, parent in entries:
            if key not in self._slot_of:
                self._slot_of[key], self._tokens_of[key], self._order[key] = slot, tokens, None
                if parent is not None and key[0] == 0:
                    self._parent_of[key[1]] = parent
        used = set(self._slot_of.values())
        self._free = [slot for slot in range(self.total - 1, -1, -1) if slot not in used]

    def _drop(self, key: CacheKey, cause: EvictionCause) -> None:
        del self._order[key]
        del self._tokens_of[key]
        self._free.append(self._slot_of.pop(key))
        if key[0] == 0:
            self._parent_of.pop(key[1], None)
        self.num_evicted[cause] += 1
        if self.journal is not None and key[0] == 0:
            self.journal.note("evicted", self.location, key[1])
        for listener in self.listeners:
            listener.evicted(self, key, cause)

    def parent_hash(self, digest: bytes) -> bytes | None:
        """Of the block of group 0 with this hash; None if it is not known."""
        return self._parent_of.get(digest)

    def newest(self) -> Iterator[bytes]:
        """Hashes of blocks of group 0, the most recently used first."""
        return (digest for group, digest in reversed(self._order) if group == 0)

    def num_by_state(self) -> dict[str, int]:
        """All slots: the values add up to the total."""
        moving = len(self._filling) + len(self._pins)
        return {"moving": moving, "cached": self.num_used - moving, "free": len(self._free)}

    def digests(self) -> list[bytes]:
        return [key[1] for key in self._slot_of if key[0] == 0 and self.read(key) is not None]

    def check(self) -> None:
        """Check the equation, and that no slot is used twice."""
        num_ready = len(self._order) - len(self._pins)
        parts = (len(self._free), num_ready, len(self._filling), len(self._pins))
        keys = {*self._order, *self._filling}
        slots = {*self._free, *self._slot_of.values()}
        if sum(parts) != self.total or keys != set(self._slot_of) or len(slots) != self.total or num_ready < 0:
            raise AssertionError(f"equation of {self.location} broken: {parts} of {self.total} slots")
