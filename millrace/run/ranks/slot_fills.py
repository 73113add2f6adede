"""Adapters on rank 0, the mirror and in the step log: each reads the same files, and fills the same slot between the
same steps."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from millrace.errors import AdapterError
from millrace.models.adapters.config import MAX_RANK
from millrace.models.adapters.read import Adapter, read_adapter
from millrace.models.adapters.slots import AdapterSlots
from millrace.run.device.adapter_slots import IsReady
from millrace.run.ranks.recorder import SlotFill, StepRecorder

COPY_LIMIT_S = 60.0
COPY_POLL_S = 0.001


class TakesAdapters(Protocol):
    @property
    def slots(self) -> AdapterSlots | None: ...

    def fill_slot(self, slot: int, adapter: Adapter | None) -> IsReady: ...


def recorded(
    fill_slot: Callable[[int, Adapter | None], IsReady], *steps: StepRecorder
) -> Callable[[int, Adapter | None], IsReady]:
    """`fill_slot` of a runner whose steps are recorded. The record comes before the first step that may read the
    slot."""

    def fill(slot: int, adapter: Adapter | None) -> IsReady:
        is_ready = fill_slot(slot, adapter)
        folder, digest = ("", "") if adapter is None else (str(adapter.folder), adapter.digest)

        def asked() -> bool:
            if not is_ready():
                return False
            for recorder in steps:
                recorder.slot(SlotFill(slot, folder, digest))
            return True

        return asked

    return fill


def fill_as_recorded(runner: TakesAdapters, record: SlotFill) -> None:
    """Raises AdapterError if the files are not those that rank 0 read."""
    slots, adapter = runner.slots, None
    assert slots is not None
    if record.folder:
        folder = Path(record.folder)
        # Rank 0 has checked its size.
        adapter = read_adapter(folder, slots.targets, slots.dtype, max_rank=MAX_RANK, max_bytes=sys.maxsize)
        if adapter.digest != record.digest:
            raise AdapterError(f"{folder} has changed since rank 0 read it.")
    is_ready, until = runner.fill_slot(record.slot, adapter), time.monotonic() + COPY_LIMIT_S
    while not is_ready():
        if time.monotonic() > until:
            raise AdapterError(f"{record.folder} was not copied to the device within {COPY_LIMIT_S:g} s.")
        time.sleep(COPY_POLL_S)
