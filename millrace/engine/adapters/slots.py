"""The slots on the device: which adapter each one holds, who uses it, how much memory it takes, and which give way.

A slot takes the memory of its own adapter's matrices, so one of rank 8 never takes the room of one of rank 256.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from millrace.engine.adapters.store import AdapterStore
from millrace.errors import DeviceFull
from millrace.link.messages import RankClass
from millrace.models.adapters.read import Adapter
from millrace.plan.step import ALL_LINEARS, QKV_ALONE

Fill = Callable[[int, Adapter | None], Callable[[], bool]]
"""(slot, matrices; None to empty it): begins to fill it. What it returns is asked until it says that later steps may
read the slot. Raises DeviceFull."""
RANK_CLASSES = (8, 16, 32, 64, 128, 256)
"""Adapters are counted under the smallest of these that is not below their largest rank."""


@dataclass(slots=True)
class Slot:
    number: int
    name: str
    digest: str
    num_bytes: int
    max_rank: int
    changes: int
    """See `Request.adapter_changes`."""
    since: float
    """When its matrices began to be copied."""
    is_filled: bool = False
    """Later steps may read it."""
    users: set[int] = field(default_factory=set)
    """Open requests."""


class DeviceSlots:
    def __init__(self, store: AdapterStore, num_slots: int, fill: Fill, max_bytes: int | None) -> None:
        """`max_bytes`: of the device's memory, for all slots; None if they take none."""
        self.num_slots, self.max_bytes = num_slots, max_bytes
        self._store, self._fill = store, fill
        self._free = list(range(num_slots, 0, -1))
        self._slots: OrderedDict[str, Slot] = OrderedDict()
        """By digest, the least recently used first."""
        self._filling: list[tuple[Slot, Callable[[], bool]]] = []
        """Slots whose matrices are being copied."""
        self.num_fills = self.num_evictions = self.num_refused = 0
        """Slots filled; those of them that replaced another adapter; adapters that the device had no memory for."""

    @property
    def is_filling(self) -> bool:
        return bool(self._filling)

    @property
    def used_bytes(self) -> int:
        return sum(slot.num_bytes for slot in self._slots.values())

    @property
    def open_requests(self) -> dict[str, int]:
        """By name of the adapters in slots."""
        found: dict[str, int] = {}
        for slot in self._slots.values():
            found[slot.name] = found.get(slot.name, 0) + len(slot.users)
        return found

    @property
    def digests(self) -> frozenset[str]:
        """Versions in slots."""
        return frozenset(digest for digest, slot in self._slots.items() if slot.is_filled)

    def rank_classes(self) -> tuple[RankClass, ...]:
        """What is in the slots, by class."""
        found: dict[int, list[int]] = {}
        for slot in self._slots.values():
            number = next(rank for rank in RANK_CLASSES if rank >= slot.max_rank)
            found.setdefault(number, []).append(slot.num_bytes)
        return tuple(RankClass(rank, len(sizes), sum(sizes)) for rank, sizes in sorted(found.items()))

    def get(self, digest: str) -> Slot | None:
        return self._slots.get(digest) if digest else None

    def take(self, slot: Slot, request_id: int) -> None:
        self._slots.move_to_end(slot.digest)
        slot.users.add(request_id)

    def finish_copies(self) -> None:
        for slot, is_ready in self._filling:
            slot.is_filled = is_ready()
        self._filling = [one for one in self._filling if not one[0].is_filled]

    def give(self, name: str, adapter: Adapter, now: float) -> Slot | None:
        """A slot for it, which is being filled. None: all slots, or too much of the memory, are in use. Raises
        DeviceFull."""
        number = self._free_number(adapter.num_bytes)
        if number is None:
            return None
        try:
            is_ready = self._begin(number, adapter)
        except DeviceFull:
            self._free.append(number)
            self.num_refused += 1
            raise
        slot = self._slots[adapter.digest] = Slot(
            number,
            name,
            adapter.digest,
            adapter.num_bytes,
            adapter.max_rank,
            changes=QKV_ALONE if adapter.qkv_alone else ALL_LINEARS,
            since=now,
        )
        self._store.pin(adapter.digest)
        self.num_fills += 1
        slot.is_filled = is_ready()
        if not slot.is_filled:
            self._filling.append((slot, is_ready))
        return slot

    def giving_way(self, num_bytes: int) -> list[Slot]:
        """The slots used longest ago that must become free for an adapter of this size."""
        found, numbers = [], len(self._free)
        left = 0 if self.max_bytes is None else self.max_bytes - self.used_bytes - num_bytes
        for slot in self._slots.values():
            if numbers and left >= 0:
                break
            found.append(slot)
            numbers += 1
            left += slot.num_bytes
        return found

    def _begin(self, number: int, adapter: Adapter) -> Callable[[], bool]:
        """If the device has no memory, slots that nobody uses give theirs first."""
        while True:
            try:
                return self._fill(number, adapter)
            except DeviceFull:
                unused = self._unused()
                if not unused or self.max_bytes is None:
                    raise
                self._evict(unused[0])

    def _unused(self) -> list[Slot]:
        return [slot for slot in self._slots.values() if slot.is_filled and not slot.users]

    def _free_number(self, num_bytes: int) -> int | None:
        """Those used longest ago give their slots away. Nothing gives way in vain."""
        unused, max_bytes = self._unused(), self.max_bytes
        used_bytes = self.used_bytes
        if max_bytes is not None and used_bytes - sum(slot.num_bytes for slot in unused) + num_bytes > max_bytes:
            return None
        while not self._free or (max_bytes is not None and used_bytes + num_bytes > max_bytes):
            if not unused:
                return None
            used_bytes -= unused[0].num_bytes
            self._evict(unused.pop(0))
        return self._free.pop()

    def _evict(self, slot: Slot) -> None:
        del self._slots[slot.digest]
        self._store.unpin(slot.digest)
        if self.max_bytes is not None:
            self._fill(slot.number, None)()  # Asked at once: only then is it recorded, before the slot is filled again.
        self._free.append(slot.number)
        self.num_evictions += 1
