"""Ring buffers that carry packets to the device and drawn tokens back.

A packet is copied from pinned memory to a device slot, on a stream of its own, while the previous step still runs.
Graphs read the packet at one fixed address, so it is copied there, on the device, when its step begins; if the device
is idle, it is copied there directly. Drawn tokens are written to the device buffer of their turn and copied back while
the next step runs.

Steps take turns, RING of them: step n uses the buffers of turn n % RING. `RunnerFacts` has fewer steps in flight, so
when a turn is reused its packet has been read and its tokens are back.
Padding-only steps, which the host does not wait for, are sent only while nothing else is in flight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from millrace.plan.step import Int32s
from millrace.run.device.side_stream import SideStream

RING = 4
"""Number of turns; must exceed the number of steps in flight."""
SEND_UNIT = 1024
"""Packets are sent in multiples of this many words."""
NUM_PRESLICED = 24
"""Packet sizes, in send units, whose tensors are sliced at the start: enough for prompts of some thousand tokens."""


class PacketRing:
    def __init__(self, words: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.on_device = torch.zeros(words, dtype=torch.int32, device=device)
        """The fixed address at which graphs read the current step's packet."""
        self._words = words
        self._buffers = [torch.zeros(words, dtype=torch.int32, pin_memory=pinned) for _ in range(RING)]
        self._views: list[Int32s] = [buffer.numpy() for buffer in self._buffers]
        self._slices: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}
        self._uploader = _Uploader(words, device) if device.type == "cuda" else None
        self.turn = 0
        for units in range(1, NUM_PRESLICED + 1):
            self._slice_all_turns(units * SEND_UNIT)

    def next(self) -> Int32s:
        """Advance to the next turn and return its host buffer, to be written."""
        self.turn = (self.turn + 1) % RING
        return self._views[self.turn]

    def send(self, used: int) -> None:
        """Copy the used words to the device, rounded up to SEND_UNIT: slicing new tensors in every step would take
        longer than copying some unused words."""
        words = -(-used // SEND_UNIT) * SEND_UNIT
        if (self.turn, words) not in self._slices:
            self._slice_all_turns(words)
        source, slot, target = self._slices[self.turn, words]
        if self._uploader is None:
            target.copy_(source)
        else:
            self._uploader.copy(source, slot, target, self.turn)

    def _slice_all_turns(self, words: int) -> None:
        """Slice the tensors of this size for every turn."""
        target = self.on_device[:words]
        for turn, buffer in enumerate(self._buffers):
            slot = target if self._uploader is None else self._uploader.slots[turn][:words]
            self._slices[turn, words] = buffer[:words], slot, target


class _Uploader:
    """Copies packets to a GPU on a side stream."""

    def __init__(self, words: int, device: torch.device) -> None:
        self.slots = [torch.zeros(words, dtype=torch.int32, device=device) for _ in range(RING)]
        self._side = SideStream()
        self._steps = self._side.steps
        self._moved = [torch.cuda.Event() for _ in range(RING)]  # type: ignore[no-untyped-call]
        """Per slot, recorded on the steps' stream when its packet has been copied to the fixed address."""
        self._side.follow_steps()  # the slots are zeroed on the steps' stream

    def copy(self, source: Tensor, slot: Tensor, target: Tensor, turn: int) -> None:
        if self._steps.query():  # the device is idle: copy directly, for the lowest latency
            target.copy_(source, non_blocking=True)
            return
        self._side.wait_for(self._moved[turn])  # the slot's previous packet has been read
        with self._side:
            slot.copy_(source, non_blocking=True)
        self._side.lead_steps()
        # On the steps' stream: after the last kernel that reads the previous packet, before this step's first kernel.
        target.copy_(slot, non_blocking=True)
        self._moved[turn].record(self._steps)


class TokenRing:
    """The drawn tokens, int32: for each turn a device buffer and a pinned host buffer.

    A device buffer is not written while it is copied back: the next step uses the next turn.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.on_device = torch.zeros(RING * max_rows, dtype=torch.int32, device=device)
        self._max_rows = max_rows
        self._buffers = self.on_device.view(RING, max_rows).unbind()
        pinned = device.type == "cuda"
        self._host = [torch.zeros(max_rows, dtype=torch.int32, pin_memory=pinned) for _ in range(RING)]
        self._slices: dict[tuple[int, int], tuple[Tensor, Tensor, Int32s]] = {}
        """By (turn, count). Sliced once: slicing in every step would take as long as a copy."""

    def start(self, turn: int) -> int:
        """Index in `on_device` at which the turn's buffer begins."""
        return turn * self._max_rows

    def device_tokens(self, turn: int, count: int) -> Tensor:
        return self._slice(turn, count)[0]

    def host_tokens(self, turn: int, count: int) -> Tensor:
        return self._slice(turn, count)[1]

    def host_array(self, turn: int, count: int) -> Int32s:
        """The memory of `host_tokens`."""
        return self._slice(turn, count)[2]

    def _slice(self, turn: int, count: int) -> tuple[Tensor, Tensor, Int32s]:
        sliced = self._slices.get((turn, count))
        if sliced is None:
            host = self._host[turn][:count]
            self._slices[turn, count] = sliced = self._buffers[turn][:count], host, host.numpy()
        return sliced
