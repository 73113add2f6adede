"""Requests with an adapter: held back until it has a slot on the device. A held request takes no row.

A slot belongs to one version of one adapter. Requests pin it from the moment it is theirs to their end, so it is filled
anew only when none of them is open. Steps in flight read the old matrices, steps launched once the slot is ready the
new ones. On a GPU matrices are copied beside the steps, and requests wait for the end of the copy.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from millrace.engine.adapters.slots import DeviceSlots, Fill, Slot
from millrace.engine.adapters.store import AdapterStore, Known
from millrace.errors import DeviceFull
from millrace.params.sampling import SamplingParams
from millrace.plan.request import Request

log = logging.getLogger(__name__)

_SEE_LOG = "the server's log and its operators see why."
"""Errors of reading name files, which are not for everybody."""
MAX_PASSED_S = 2.0
"""When a request has waited this long for a slot or its memory, no later request gets what it needs: the slots used
longest ago become free for it as their open requests end."""
LIMIT_S = 120.0
"""For reading an adapter's files, and for copying it to the device: then requests for it fail."""


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
    asked_at: float = 0.0
    """When they were asked for."""


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
        self.store = store
        self._clock = clock
        self.slots = DeviceSlots(store, num_slots, fill, max_bytes)
        self._slot_of: dict[int, Slot] = {}
        """By open request."""
        self._held: OrderedDict[int, _Held] = OrderedDict()
        """In the order in which they came."""
        self._turn: _Held | None = None
        """The request that is not passed any more. Its adapter stays in host memory."""
        self._turn_digest = ""
        self._giving_way: frozenset[str] = frozenset()
        """Versions whose slots become free for it."""
        self._is_full = False
        """The last look for a free slot found none."""
        self._failed: list[Failed] = []
        self._doomed: dict[int, Request] = {}
        """Those of `_failed`, until they are dropped."""
        self.expected: dict[str, Known] = {}
        """By name: adapters that are being added."""

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def is_loading(self) -> bool:
        return self.store.is_loading or self.slots.is_filling

    @property
    def has_waiting(self) -> bool:
        return bool(self._held) or self.slots.is_filling

    def hold(self, request: Request, params: SamplingParams, version: Known | None = None) -> bool:
        """False if the request has its slot and can be scheduled. Else it waits for `take_ready`, or `take_failed` says
        why it must end. `version`: of the adapter; None: the usual one."""
        known = version or self.store.get(params.adapter) or self.expected.get(params.adapter)
        if known is None:
            self._fail(request, unknown_adapter(params.adapter, self.store.names()))
            return True
        if failure := self._too_large(known):
            self._fail(request, _cannot(known, failure))
            return True
        held = _Held(request, params, known, self._clock())
        self._is_full = False
        self._choose_turn()
        if self._seated(held):
            return False
        if request.id not in self._doomed:
            self._held[request.id] = held
        return True

    def take_ready(self) -> list[tuple[Request, SamplingParams]]:
        """Requests that have a slot now, in the order in which they came."""
        self.slots.finish_copies()
        self._is_full, ready = False, []
        self._choose_turn()
        for held in list(self._held.values()):
            had_turn = held is self._turn
            if self._seated(held):
                ready.append((held.request, held.params))
            if had_turn and self._turn is None:
                self._choose_turn()
        return ready

    def take_failed(self) -> list[Failed]:
        failed, self._failed = self._failed, []
        return failed

    def drop(self, request_id: int) -> Request | None:
        """The request ends while it is held: return it, or None if it is not held."""
        held = self._forget(request_id)
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
                    self._fail(held.request, _cannot(known, _SEE_LOG if known.failure else failure))

    def _too_large(self, known: Known) -> str:
        max_bytes = self.slots.max_bytes
        if max_bytes is None or known.num_bytes <= max_bytes:
            return ""
        return (
            f"it has {known.num_bytes:,} bytes, and the device has {max_bytes:,} for all adapters. Raise"
            " --max-adapters or --max-lora-rank, which reserve more."
        )

    def _fail(self, request: Request, message: str) -> None:
        self._forget(request.id)
        self._doomed[request.id] = request
        self._failed.append(Failed(request.id, message))

    def _forget(self, request_id: int) -> _Held | None:
        """It is not held any more."""
        held = self._held.pop(request_id, None)
        if held is not None and held is self._turn:
            self._set_turn(None)
        return held

    def _seated(self, held: _Held) -> bool:
        """True if it has its slot now. It may fail instead."""
        try:
            slot = self._slot_for(held)
        except DeviceFull as error:
            log.warning("The adapter %r has no room on the device: %s", held.known.name, error.message)
            self._fail(held.request, _cannot(held.known, error.message))
            return False
        if slot is None or not slot.is_filled:
            if late := self._late(held, slot):
                self._fail(held.request, _cannot(held.known, late))
            return False
        self._forget(held.request.id)
        self._take(held, slot)
        return True

    def _slot_for(self, held: _Held) -> Slot | None:
        """Its adapter's slot, which is perhaps being filled. None: it must wait for one, or for files."""
        known, passed = held.known, self._passed_by(held)
        slot = self.slots.get(known.digest)
        if slot is not None:
            return None if passed is not None and slot.digest in self._giving_way else slot
        adapter = self.store.adapter(known)
        if adapter is None:
            if not held.needs_files:
                held.needs_files, held.asked_at = True, self._clock()
                self.store.load(known)
            return None
        if passed is not None or self._is_full:
            return None
        slot = self.slots.give(known.name, adapter, self._clock())
        self._is_full = slot is None
        return slot

    def _late(self, held: _Held, slot: Slot | None) -> str:
        now = self._clock()
        if slot is not None and now - slot.since > LIMIT_S:
            return f"it was not copied to the device within {LIMIT_S:g} s. Send the request again."
        if held.needs_files and now - held.asked_at > LIMIT_S:
            return f"its files were not read within {LIMIT_S:g} s. Send the request again."
        return ""

    def _take(self, held: _Held, slot: Slot) -> None:
        request = held.request
        self.slots.take(slot, request.id)
        self._slot_of[request.id] = slot
        request.adapter, request.adapter_changes = slot.number, slot.changes
        request.salt = adapter_salt(slot.digest, request.salt)
        request.diagnostics.adapter = slot.name
        request.diagnostics.adapter_wait_s = self._clock() - held.since

    def _passed_by(self, held: _Held) -> _Held | None:
        """The request that must not be passed by this one any more."""
        turn = self._turn
        is_later = turn is not None and turn.since <= held.since and turn.known.digest != held.known.digest
        return turn if is_later else None

    def _choose_turn(self) -> None:
        """The first request to lack nothing but room, once it has waited for long."""
        until = self._clock() - MAX_PASSED_S
        if self._turn is not None and self.slots.get(self._turn.known.digest) is None:
            self._set_turn(self._turn)
            return
        for held in self._held.values():
            if held.since >= until:
                break
            known = held.known
            if self.slots.get(known.digest) is None and self.store.adapter(known) is not None:
                self._set_turn(held)
                return
        self._set_turn(None)

    def _set_turn(self, held: _Held | None) -> None:
        if held is not self._turn:
            if self._turn is not None:
                self.store.unpin(self._turn_digest)
            self._turn = held
            if held is not None:
                self._turn_digest = held.known.digest
                self.store.pin(self._turn_digest)
        slots = [] if held is None else self.slots.giving_way(held.known.num_bytes)
        self._giving_way = frozenset(slot.digest for slot in slots)


def _cannot(known: Known, failure: str) -> str:
    return f"The adapter {known.name!r} cannot be used: {failure}"


def adapter_salt(digest: str, salt: bytes) -> bytes:
    """Requests of one adapter share blocks with each other only. The salt still begins with its tenant."""
    return salt + b"adapter\0" + bytes.fromhex(digest)


def unknown_adapter(name: str, names: list[str]) -> str:
    some = ", ".join(map(repr, names[:20])) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
    return f"There is no adapter {name[:200]!r}; " + (f"this model has {some}." if names else "this model has none.")
