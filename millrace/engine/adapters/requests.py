"""Requests with an adapter: held back until it has a slot on the device. A held request takes no row.

A slot belongs to one version of one adapter. Requests pin it from the moment it is theirs to their end, so it is filled
anew only when none of them is open. Steps in flight read the old matrices, steps launched once the slot is ready the
new ones. On a GPU matrices are copied beside the steps, and requests wait for the end of the copy.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from millrace.engine.adapters.store import AdapterStore, Known
from millrace.models.adapters.read import Adapter
from millrace.params import SamplingParams
from millrace.plan.request import Request

Fill = Callable[[int, Adapter | None], Callable[[], bool]]
"""(slot, matrices; None to empty it): begins to fill it. What it returns is asked until it says that later steps may
read the slot."""
_SEE_LOG = "the server's log and its operators see why."
"""Errors of reading name files, which are not for everybody."""
MAX_PASSED_S = 2.0
"""When a request has waited this long for a slot, no new request is given the slot used longest ago: it becomes free as
its open requests end."""


@dataclass(slots=True)
class Slot:
    number: int
    name: str
    digest: str
    num_bytes: int
    is_filled: bool = False
    """Later steps may read it."""
    users: set[int] = field(default_factory=set)
    """Open requests."""


@dataclass(frozen=True, slots=True)
class Failed:
    request_id: int
    message: str


@dataclass(slots=True)
class _Held:
    request: Request
    params: SamplingParams
    known: Known
    since: float
    needs_files: bool = False
    """Its adapter's files are being read."""


class AdaptedRequests:
    def __init__(
        self,
        store: AdapterStore,
        num_slots: int,
        fill: Fill,
        clock: Callable[[], float] = time.monotonic,
        max_bytes: int | None = None,
    ) -> None:
        """`max_bytes`: of the device's memory, for all slots; None if they take none."""
        self.store, self._fill, self._clock, self._max_bytes = store, fill, clock, max_bytes
        self.num_slots = num_slots
        self._free = list(range(num_slots, 0, -1))
        self._slots: OrderedDict[str, Slot] = OrderedDict()
        """By digest, the least recently used first."""
        self._filling: list[tuple[Slot, Callable[[], bool]]] = []
        """Slots whose matrices are being copied."""
        self._slot_of: dict[int, Slot] = {}
        """By open request."""
        self._held: OrderedDict[int, _Held] = OrderedDict()
        self._failed: list[Failed] = []
        self._doomed: dict[int, Request] = {}
        """Those of `_failed`, until they are dropped."""
        self.expected: dict[str, Known] = {}
        """By name: adapters that are being added."""
        self.num_fills = 0
        """Times that a slot was filled."""
        self.num_slot_evictions = 0
        """Those of them that replaced another adapter."""

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def is_loading(self) -> bool:
        return self.store.is_loading or bool(self._filling)

    @property
    def has_waiting(self) -> bool:
        return bool(self._held or self._filling)

    @property
    def resident(self) -> dict[str, int]:
        """Open requests by name of the adapters in slots."""
        found: dict[str, int] = {}
        for slot in self._slots.values():
            found[slot.name] = found.get(slot.name, 0) + len(slot.users)
        return found

    @property
    def digests(self) -> frozenset[str]:
        """Versions in slots."""
        return frozenset(digest for digest, slot in self._slots.items() if slot.is_filled)

    def hold(self, request: Request, params: SamplingParams) -> bool:
        """False if the request has its slot and can be scheduled. Else it waits for `take_ready`, or `take_failed` says
        why it must end."""
        known = self.store.get(params.adapter) or self.expected.get(params.adapter)
        if known is None:
            self._fail(request, unknown_adapter(params.adapter, self.store.names()))
            return True
        if failure := self._too_large(known):
            self._fail(request, _cannot(known, failure))
            return True
        held = _Held(request, params, known, self._clock())
        if self._seat(held):
            return False
        self._held[request.id] = held
        return True

    def take_ready(self) -> list[tuple[Request, SamplingParams]]:
        """Requests that have a slot now, in the order in which they came."""
        for slot, is_ready in self._filling:
            slot.is_filled = is_ready()
        self._filling = [one for one in self._filling if not one[0].is_filled]
        ready = []
        for held in list(self._held.values()):
            if self._seat(held):
                del self._held[held.request.id]
                ready.append((held.request, held.params))
        return ready

    def take_failed(self) -> list[Failed]:
        failed, self._failed = self._failed, []
        return failed

    def drop(self, request_id: int) -> Request | None:
        """The request ends while it is held: return it, or None if it is not held."""
        held = self._held.pop(request_id, None)
        return self._doomed.pop(request_id, None) if held is None else held.request

    def expired(self, now: float) -> list[int]:
        return [one for one, held in self._held.items() if held.request.deadline < now]

    def close(self, request_id: int) -> None:
        """The request has ended. Ids without an adapter are ignored."""
        slot = self._slot_of.pop(request_id, None)
        if slot is not None:
            slot.users.discard(request_id)

    def note_loaded(self, loaded: list[Known]) -> None:
        """The files of these were read."""
        for known in loaded:
            for held in list(self._held.values()):
                if held.known is not known:
                    continue
                held.needs_files = False
                if failure := known.failure or self._too_large(known):
                    del self._held[held.request.id]
                    self._fail(held.request, _cannot(known, _SEE_LOG if known.failure else failure))

    def _too_large(self, known: Known) -> str:
        if self._max_bytes is None or known.num_bytes <= self._max_bytes:
            return ""
        return (
            f"it has {known.num_bytes:,} bytes, and the device has {self._max_bytes:,} for all adapters. Raise"
            " --max-adapters or --max-lora-rank, which reserve more."
        )

    def _fail(self, request: Request, message: str) -> None:
        self._doomed[request.id] = request
        self._failed.append(Failed(request.id, message))

    def _seat(self, held: _Held) -> bool:
        known = held.known
        slot = self._slots.get(known.digest) if known.digest else None
        if slot is not None:
            return slot.is_filled and not self._must_yield(slot, held) and self._take(held, slot)
        adapter = self.store.adapter(known)
        if adapter is None:
            if not held.needs_files:
                held.needs_files = True
                self.store.load(known)
            return False
        number = self._free_slot(adapter.num_bytes)
        if number is None:
            return False
        slot = self._slots[known.digest] = Slot(number, known.name, known.digest, adapter.num_bytes)
        self.store.pin(known.digest)
        is_ready = self._fill(number, adapter)
        self.num_fills += 1
        slot.is_filled = is_ready()
        if not slot.is_filled:
            self._filling.append((slot, is_ready))
            return False
        return self._take(held, slot)

    def _take(self, held: _Held, slot: Slot) -> bool:
        request = held.request
        self._slots.move_to_end(slot.digest)
        slot.users.add(request.id)
        self._slot_of[request.id] = slot
        request.adapter, request.salt = slot.number, adapter_salt(slot.digest, request.salt)
        request.diagnostics.adapter = slot.name
        request.diagnostics.adapter_wait_s = self._clock() - held.since
        return True

    def _must_yield(self, slot: Slot, held: _Held) -> bool:
        """True if a request has waited long for a slot, and this is the one to become free for it."""
        if self._free or next(iter(self._slots.values())) is not slot:
            return False
        now = self._clock()
        others = (one for one in self._held.values() if one.known.digest != slot.digest and not one.needs_files)
        oldest = next(others, None)
        return oldest is not None and oldest.since < held.since and now - oldest.since > MAX_PASSED_S

    def _free_slot(self, num_bytes: int) -> int | None:
        """A slot that nobody uses, with so much memory; those used longest ago give theirs away. None: all slots, or
        too much of the memory, are in use."""
        unused = [slot for slot in self._slots.values() if slot.is_filled and not slot.users]
        used_bytes = sum(slot.num_bytes for slot in self._slots.values())
        if self._max_bytes is not None:
            if used_bytes - sum(slot.num_bytes for slot in unused) + num_bytes > self._max_bytes:
                return None
        elif not self._free and not unused:
            return None
        while not self._free or (self._max_bytes is not None and used_bytes + num_bytes > self._max_bytes):
            if not unused:
                return None
            used_bytes -= unused[0].num_bytes
            self._evict(unused.pop(0))
        return self._free.pop()

    def _evict(self, slot: Slot) -> None:
        del self._slots[slot.digest]
        self.store.unpin(slot.digest)
        if self._max_bytes is not None:
            self._fill(slot.number, None)
        self._free.append(slot.number)
        self.num_slot_evictions += 1


def _cannot(known: Known, failure: str) -> str:
    return f"The adapter {known.name!r} cannot be used: {failure}"


def adapter_salt(digest: str, salt: bytes) -> bytes:
    """Requests of one adapter share blocks with each other only."""
    return b"adapter\0" + bytes.fromhex(digest) + salt


def unknown_adapter(name: str, names: list[str]) -> str:
    some = ", ".join(map(repr, names[:20])) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
    return f"There is no adapter {name[:200]!r}; " + (f"this model has {some}." if names else "this model has none.")
