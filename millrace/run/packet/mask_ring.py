"""Carries grammar masks to the device: per turn of the packet ring a pinned host buffer and a device buffer.

The packet says where a step's masks will be before they are known; they are copied when the step draws, on a stream of
its own, while the step's body runs. That copy can be queued before the masks are known: it waits until the host opens
the turn's gate. With drafts, which state has which mask is known only then too, and is copied into
the packet on the device. Buffers grow on demand. When a turn comes again, its step has completed, so its buffers can be
replaced.
"""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor

from millrace.plan.step import Int32s, Uint32s
from millrace.run.device.host_gate import HostGates
from millrace.run.device.side_stream import SideStream
from millrace.run.packet.packet_ring import RING

MIN_LINES = 16


class MaskRing:
    def __init__(self, words: int, device: torch.device, max_states: int = 0, gates: HostGates | None = None) -> None:
        """`words`: 32-bit words of a mask. `max_states`: those that a step may draw from. `gates`: one for each
        turn."""
        self._words = words
        self._device = device
        self._side = SideStream() if device.type == "cuda" else None
        self._gates = gates
        self._numbers = [0] * RING
        """What opens the gate of each turn."""
        nothing = torch.zeros((0, words), dtype=torch.int32)
        self._host = [nothing] * RING
        self.on_device = [nothing] * RING
        self._lines = torch.zeros((RING, max_states), dtype=torch.int32, pin_memory=self._side is not None)

    def address(self, turn: int, count: int) -> int:
        """Device address of the turn's masks, with room for `count` of them."""
        if len(self.on_device[turn]) < count:
            self._grow(turn, count)
        return self.on_device[turn].data_ptr()

    def host(self, turn: int, count: int) -> Uint32s:
        """The turn's host buffer, which `address` made large enough. Closes the turn's gate."""
        if self._gates is not None:
            self._numbers[turn] = self._gates.close(turn)
        lines: Uint32s = self._host[turn][:count].numpy().view(np.uint32)
        return lines

    def send(self, turn: int, bits: Uint32s, lines: Int32s | None = None, packet_lines: Tensor | None = None) -> None:
        """Copy the masks to the turn's device buffer, before any work queued later on the steps' stream. `lines`, if
        they were not known when the packet was sent, go to `packet_lines`: the packet must have arrived there."""
        host, target = self._host[turn][: len(bits)], self.on_device[turn][: len(bits)]
        if bits.ctypes.data != host.data_ptr():
            host.numpy()[:] = bits.view(np.int32)
        copies = [(target, host)]
        if lines is not None and packet_lines is not None:
            lines_host = self._lines[turn, : len(lines)]
            lines_host.numpy()[:] = lines
            copies.append((packet_lines, lines_host))
        with self._side or nullcontext():
            for to, source in copies:
                to.copy_(source, non_blocking=self._side is not None)
        if self._side is not None:
            self._side.lead_steps()

    def ready(self, turn: int) -> None:
        """The turn's host buffer holds its masks."""
        if self._gates is not None:
            self._gates.open(turn, self._numbers[turn])

    def send_when_ready(self, turn: int, count: int) -> None:
        """Like `send`, for masks that the host still computes in the turn's host buffer. `ready` must be called, before
        or after this, in any thread."""
        assert self._side is not None
        assert self._gates is not None
        with self._side:
            self._side.wait_for_host(self._gates, turn, self._numbers[turn])
            self.on_device[turn][:count].copy_(self._host[turn][:count], non_blocking=True)
        self._side.lead_steps()

    def _grow(self, turn: int, count: int) -> None:
        lines = max(MIN_LINES, 1 << (count - 1).bit_length())
        self._host[turn] = self._new(lines, torch.device("cpu"))
        self.on_device[turn] = self._new(lines, self._device)
        if self._side is not None:
            self._side.follow_steps()  # this memory may still be read by earlier work

    def _new(self, lines: int, device: torch.device) -> Tensor:
        pinned = device.type == "cpu" and self._device.type == "cuda"
        return torch.zeros((lines, self._words), dtype=torch.int32, device=device, pin_memory=pinned)
