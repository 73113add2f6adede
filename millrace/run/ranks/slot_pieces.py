"""Adapters over ranks: rank 0 sends what it read to the others in pieces, between their steps, and each cuts its part.

Files may have changed since rank 0 read them, so the other ranks do not read them.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from millrace.models.adapters.files import Packed, PackedLinear
from millrace.models.adapters.read import Adapter, dtype_of, name_of, unpacked
from millrace.models.adapters.shard import AdapterShard
from millrace.run.device.adapter_slots import IsReady
from millrace.run.ranks.recorder import SlotPiece, StepRecorder
from millrace.run.ranks.slot_fills import TakesAdapters

PIECE_BYTES = 1 << 19
"""A step that is sent meanwhile waits for at most one piece."""


class RankedSlots:
    """Rank 0's. Its own slot is filled once the others have everything: no later step finds one without."""

    def __init__(self, runner: TakesAdapters, ranks: StepRecorder, shard: AdapterShard) -> None:
        self._runner = runner
        self._ranks = ranks
        self._shard = shard
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rank-adapters")

    def fill(self, slot: int, adapter: Adapter | None) -> IsReady:
        sent: Future[Adapter | None] = self._thread.submit(self._send, slot, adapter)
        own: list[IsReady] = []

        def is_ready() -> bool:
            if not own:
                if not sent.done():
                    return False
                own.append(self._runner.fill_slot(slot, sent.result()))
            return own[0]()

        return is_ready

    def _send(self, slot: int, adapter: Adapter | None) -> Adapter | None:
        """This rank's part."""
        if adapter is None:
            self._ranks.slot_piece(SlotPiece(slot, is_last=True))
            return None
        data = adapter.data.view(torch.uint8).numpy().data
        for first in range(0, len(data), PIECE_BYTES):
            self._ranks.slot_piece(SlotPiece(slot, bytes(data[first : first + PIECE_BYTES])))
        self._ranks.slot_piece(SlotPiece(slot, is_last=True, packed=_packed(adapter)))
        return self._shard.part_of(adapter)


class SlotReceiver:
    """Another rank's."""

    def __init__(self, runner: TakesAdapters, shard: Callable[[], AdapterShard]) -> None:
        """`shard` is made for the first adapter."""
        self._runner = runner
        self._make_shard = shard
        self._shard: AdapterShard | None = None
        self._data = bytearray()

    def take(self, piece: SlotPiece) -> None:
        """Fill the slot with the last piece."""
        self._data += piece.data
        if piece.is_last:
            data, self._data = self._data, bytearray()
            self._runner.fill_slot(piece.slot, None if piece.packed is None else self._part(data, piece.packed))

    def _part(self, data: bytearray, packed: Packed) -> Adapter:
        slots = self._runner.slots
        assert slots is not None
        if self._shard is None:
            self._shard = self._make_shard()
        return self._shard.part_of(unpacked(packed, torch.frombuffer(data, dtype=dtype_of(packed)), Path()))


def _packed(adapter: Adapter) -> Packed:
    linears = tuple(
        PackedLinear(
            index,
            int(lora.a.storage_offset()),
            lora.a.numel(),
            int(lora.b.storage_offset()),
            lora.b.numel(),
            lora.ranks,
            lora.scales,
        )
        for index, lora in adapter.linears.items()
    )
    return Packed(
        linears=linears,
        num_numbers=adapter.data.numel(),
        max_rank=adapter.max_rank,
        digest=adapter.digest,
        base_model=adapter.base_model,
        dtype=name_of(adapter.data.dtype),
    )
