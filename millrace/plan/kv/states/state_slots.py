"""Slots for checkpoints: whole recurrent states of a model, kept by the hash of the prefix that led to them.

Every slot is in exactly one of four states, and the equation always holds:
    free + filling + ready + leaving = total
  free     has no content worth keeping
  filling  a launched step writes it; owned by the request of that row
  ready    can be read; evicted in least-recently-used order, the plain ends of chunks first
  leaving  a row will begin with it, but no plan has said so yet; not evicted

Copies to and from slots are part of a step, and steps run in order: a slot can be given away as soon as the plan that
reads it is made.
"""

from __future__ import annotations

from collections import OrderedDict


class StateSlots:
    def __init__(self, num_slots: int) -> None:
        self.total = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._filling: dict[bytes, tuple[int, int]] = {}
        """(slot, request) by hash."""
        self._ready: OrderedDict[bytes, int] = OrderedDict()
        """Slots by hash, next victim first."""
        self._leaving: dict[bytes, tuple[int, int]] = {}
        """(slot, number of rows that will read it) by hash."""
        self._minor: set[bytes] = set()
        """Hashes of checkpoints at plain ends of chunks, as long as nobody used them."""
        self.num_evicted = 0

    @property
    def num_used(self) -> int:
        return self.total - len(self._free)

    def has(self, digest: bytes) -> bool:
        """True if the checkpoint can be read."""
        return digest in self._ready or digest in self._leaving

    def fill(self, digest: bytes, owner: int, is_minor: bool = False) -> int | None:
        """A slot that the next step writes. None if the checkpoint exists or no slot can be had. A minor one takes the
        place of others of its kind only."""
        if digest in self._filling or self.has(digest):
            return None
        if not self._free:
            victim = next(iter(self._ready), None)
            if victim is None or (is_minor and victim not in self._minor):
                return None
            self._evict(victim)
        slot = self._free.pop()
        self._filling[digest] = slot, owner
        if is_minor:
            self._minor.add(digest)
        return slot

    def filled(self, digest: bytes) -> None:
        """The step that writes the slot has completed."""
        slot, _ = self._filling.pop(digest)
        self._ready[digest] = slot
        if digest in self._minor:
            self._ready.move_to_end(digest, last=False)

    def discard_filling(self) -> None:
        """The steps that would have written slots have failed."""
        for digest, (slot, _) in self._filling.items():
            self._minor.discard(digest)
            self._free.append(slot)
        self._filling.clear()

    def hold(self, digest: bytes) -> int:
        """A row will begin with this checkpoint. Returns its slot."""
        slot, num_readers = self._leaving.pop(digest, (-1, 0))
        if not num_readers:
            slot = self._ready.pop(digest)
        self._leaving[digest] = slot, num_readers + 1
        self._minor.discard(digest)
        return slot

    def let_go(self, digest: bytes) -> None:
        """A plan says so now, or the row will not need it."""
        slot, num_readers = self._leaving.pop(digest)
        if num_readers > 1:
            self._leaving[digest] = slot, num_readers - 1
        else:
            self._ready[digest] = slot

    def forget(self, mark: bytes) -> None:
        """Drop the checkpoints of the owner with this mark that no row is about to read or write."""
        for digest in [one for one in self._ready if one.endswith(mark)]:
            self._free.append(self._ready.pop(digest))
            self._minor.discard(digest)

    def _evict(self, digest: bytes) -> None:
        self._free.append(self._ready.pop(digest))
        self._minor.discard(digest)
        self.num_evicted += 1

    def check(self) -> None:
        """Check the equation, and that no slot is used twice."""
        parts = (len(self._free), len(self._filling), len(self._ready), len(self._leaving))
        held = [slot for slot, _ in (*self._filling.values(), *self._leaving.values())]
        slots = {*self._free, *self._ready.values(), *held}
        if sum(parts) != self.total or len(slots) != self.total:
            raise AssertionError(f"state slot equation broken: {parts} of {self.total} slots")
