"""A step's packet on its way to the device: one place there, and a few pinned buffers here that are written in turn."""

from __future__ import annotations

import torch
from torch import Tensor

from millrace.plan.step import Int32s

RING = 4
"""Host buffers in turn: more than there are steps in flight, so none is written while a copy may read it."""
SEND_UNIT = 1024
"""Words are sent in multiples of this."""


class PacketRing:
    def __init__(self, words: int, place: torch.device) -> None:
        pinned = place.type == "cuda"
        self.on_device = torch.zeros(words, dtype=torch.int32, device=place)
        self._words = words
        self._buffers = [torch.zeros(words, dtype=torch.int32, pin_memory=pinned) for _ in range(RING)]
        self._views: list[Int32s] = [buffer.numpy() for buffer in self._buffers]
        self._parts: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.turn = 0

    def next(self) -> Int32s:
        """The buffer to write now."""
        self.turn = (self.turn + 1) % RING
        return self._views[self.turn]

    def send(self, used: int) -> None:
        """Copy the first words of the buffer to the device, some more than are used: to cut tensors anew for every
        step would take longer than to copy a few words that nobody reads."""
        words = min(-(-used // SEND_UNIT) * SEND_UNIT, self._words)
        parts = self._parts.get((self.turn, words))
        if parts is None:
            parts = self._parts[self.turn, words] = self.on_device[:words], self._buffers[self.turn][:words]
        target, source = parts
        target.copy_(source, non_blocking=True)
