"""Fills the slots of adapters: behind the steps launched so far, and on a GPU beside them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from millrace.errors import DeviceFull
from millrace.models.adapters.read import Adapter
from millrace.models.adapters.slots import AdapterSlots
from millrace.models.adapters.targets import targets_of
from millrace.models.decoder import Decoder
from millrace.run.device.device import Device
from millrace.run.device.side_stream import SideStream
from millrace.run.settings import RunnerSettings

IsReady = Callable[[], bool]
"""True once later steps may read the slot. It is asked until it says so."""


def make_slots(decoder: Decoder, settings: RunnerSettings, *, deterministic: bool = False) -> AdapterSlots | None:
    """None: steps have no adapters."""
    if not settings.adapter_slots:
        return None
    parts = (targets_of(decoder.spec), settings.adapter_slots, decoder.device, decoder.dtype)
    return AdapterSlots(*parts, deterministic)


def room_for(adapter: Adapter, device: torch.device) -> Tensor:
    """Raises DeviceFull."""
    try:
        return torch.empty_like(adapter.data, device=device)
    except torch.OutOfMemoryError as error:
        raise DeviceFull(
            f"it has {adapter.num_bytes:,} bytes, for which the device has no memory left. Lower --kv-tokens or"
            " --max-adapters."
        ) from error


class OrderedFiller:
    """In launch order: the matrices are where steps read them already, or are copied there between two steps."""

    def __init__(self, slots: AdapterSlots, device: Device) -> None:
        self._slots = slots
        self._device = device

    def fill(self, slot: int, adapter: Adapter | None) -> IsReady:
        slots = self._slots
        self._device.queue(lambda: slots.put(slot, None if adapter is None else adapter.to(slots.device)))
        return lambda: True


class StreamFiller:
    """On a GPU: matrices are copied on a stream of its own while steps run, and the slot names them when their copy has
    ended, so no step waits for it."""

    def __init__(self, slots: AdapterSlots) -> None:
        self._slots = slots
        self._side = SideStream()

    def fill(self, slot: int, adapter: Adapter | None) -> IsReady:
        slots, side = self._slots, self._side
        if adapter is None:
            slots.put(slot, None)
            return lambda: True
        with torch.inference_mode():
            # Memory of the steps' stream: whatever was there before is read by no step behind these.
            memory = room_for(adapter, slots.device)
            side.follow_steps()
            with side:
                memory.copy_(adapter.data, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            side.record(copied)
        waiting = [adapter.on(memory)]

        def is_ready() -> bool:
            if waiting and copied.query():  # type: ignore[no-untyped-call]
                with torch.inference_mode():
                    slots.put(slot, waiting.pop())
            return not waiting

        return is_ready
