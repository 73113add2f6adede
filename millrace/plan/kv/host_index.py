"""Which blocks are in host memory: slots of one block each, found by KV group and block hash.

Every slot is in exactly one of four states, and the equation always holds:
    free + ready + filling + pinned = total
  free     has no content worth keeping
  ready    can be loaded; evicted in least-recently-used order
  filling  a copy from the device writes it
  pinned   a copy to the device reads it
"""

from __future__ import annotations

from collections import OrderedDict

from millrace.plan.planner.journal import KvJournal

Key = tuple[int, bytes]
"""KV group and block hash."""


class HostIndex:
    def __init__(self, num_slots: int) -> None:
        self.total = num_slots
        self.journal: KvJournal | None = None
        """Notes the blocks of group 0; None while nobody reads it."""
        self._free = list(range(num_slots - 1, -1, -1))
        self._ready: OrderedDict[Key, None] = OrderedDict()
        self._filling: set[Key] = set()
        self._pins: dict[Key, int] = {}
        """Number of copies that read each pinned slot."""
        self._slot_of: dict[Key, int] = {}
        self._tokens_of: dict[Key, bytes | None] = {}
        """None if the content turned out unreadable: the entry is dropped once no copy reads it."""

    @property
    def num_used(self) -> int:
        return self.total - len(self._free)

    def __contains__(self, key: Key) -> bool:
        """True if the block is in host memory or on its way there."""
        return key in self._slot_of

    def find(self, digest: bytes, tokens: bytes, group: int = 0) -> int | None:
        """The slot that holds the group's block with this hash, or None. Compares the tokens too."""
        key = (group, digest)
        if self._tokens_of.get(key) != tokens or key in self._filling:
            return None
        return self._slot_of[key]

    def touch(self, key: Key) -> None:
        """The block was used: it is evicted last."""
        if key in self._ready:
            self._ready.move_to_end(key)

    def fill(self, key: Key, tokens: bytes) -> int | None:
        """A slot for a block that is not in host memory, evicting if none is free; None if copies use all of them."""
        if key in self._slot_of:
            raise AssertionError("the block is in host memory already")
        if not self._free:
            if not self._ready:
                return None
            self._drop(next(iter(self._ready)))
        slot = self._free.pop()
        self._slot_of[key], self._tokens_of[key] = slot, tokens
        self._filling.add(key)
        return slot

    def filled(self, key: Key, failed: bool) -> None:
        """The copy to this block's slot ended."""
        self._filling.remove(key)
        self._ready[key] = None
        if failed:
            self._drop(key)
        elif self.journal is not None and key[0] == 0:
            self.journal.note("filled", "host", key[1])

    def pin(self, key: Key) -> None:
        """A copy will read the block's slot, which `find` returned."""
        self._ready.pop(key, None)
        self._pins[key] = self._pins.get(key, 0) + 1

    def unpin(self, key: Key, failed: bool) -> None:
        """The copy from the block's slot ended. If it failed, the block is not loaded again."""
        if failed:
            self._tokens_of[key] = None
        self._pins[key] -= 1
        if self._pins[key] == 0:
            del self._pins[key]
            self._ready[key] = None
            if self._tokens_of[key] is None:
                self._drop(key)

    def _drop(self, key: Key) -> None:
        del self._ready[key]
        del self._tokens_of[key]
        self._free.append(self._slot_of.pop(key))
        if self.journal is not None and key[0] == 0:
            self.journal.note("evicted", "host", key[1])

    def digests(self) -> list[bytes]:
        """Hashes of the blocks of group 0 that can be loaded."""
        return [digest for group, digest in self._slot_of if group == 0 and (group, digest) not in self._filling]

    def check(self) -> None:
        """Check the equation, and that no slot is used twice."""
        parts = (len(self._free), len(self._ready), len(self._filling), len(self._pins))
        keys = {*self._ready, *self._filling, *self._pins}
        slots = {*self._free, *self._slot_of.values()}
        if sum(parts) != self.total or keys != set(self._slot_of) or len(slots) != self.total:
            raise AssertionError(f"host equation broken: {parts} of {self.total} slots")
