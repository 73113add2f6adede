"""What a step sends and what it draws, on their way: buffers that are used in turn.

A packet is copied from pinned memory to the device's slot of its turn, on a stream of its own, while the step before
still runs. Graphs read one fixed place, so the packet is moved there, on the device, when its step begins; one that
finds the device idle goes there at once. What a step draws goes to the device's line of its turn and is copied back
while the next step runs.

A turn comes again after RING steps, and the host launches a step only when all but one of those before have completed.
Of a turn that comes again it is therefore known that its packet was read and that its tokens are back. Steps of
padding, which nobody waits for, are sent only while nothing else is in flight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from millrace.plan.step import Int32s
from millrace.run.device.side_stream import SideStream

RING = 4
"""Turns: more than there are steps in flight."""
SEND_UNIT = 1024
"""Words are sent in multiples of this."""
CUT_AHEAD = 24
"""Multiples of it for which tensors are cut at the start: the packets of prompts of some thousand tokens."""


class PacketRing:
    def __init__(self, words: int, place: torch.device) -> None:
        pinned = place.type == "cuda"
        self.on_device = torch.zeros(words, dtype=torch.int32, device=place)
        """Where graphs read the packet of the step that runs."""
        self._words = words
        self._buffers = [torch.zeros(words, dtype=torch.int32, pin_memory=pinned) for _ in range(RING)]
        self._views: list[Int32s] = [buffer.numpy() for buffer in self._buffers]
        self._parts: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}
        self._lane = _Lane(words, place) if place.type == "cuda" else None
        self.turn = 0
        for units in range(1, CUT_AHEAD + 1):
            self._cut_for_all(units * SEND_UNIT)

    def next(self) -> Int32s:
        """The buffer to write now."""
        self.turn = (self.turn + 1) % RING
        return self._views[self.turn]

    def send(self, used: int) -> None:
        """Bring the first words of the buffer to the device, some more than are used: to cut tensors anew for every
        step would take longer than to copy a few words that nobody reads."""
        words = -(-used // SEND_UNIT) * SEND_UNIT
        if (self.turn, words) not in self._parts:
            self._cut_for_all(words)
        source, slot, target = self._parts[self.turn, words]
        if self._lane is None:
            target.copy_(source)
        else:
            self._lane.bring(source, slot, target, self.turn)

    def _cut_for_all(self, words: int) -> None:
        """The tensors of so many words, or of all there are, for every turn."""
        target = self.on_device[:words]
        for turn, buffer in enumerate(self._buffers):
            slot = target if self._lane is None else self._lane.slots[turn][:words]
            self._parts[turn, words] = buffer[:words], slot, target


class _Lane:
    """The way of packets to a GPU, beside the stream of the steps."""

    def __init__(self, words: int, place: torch.device) -> None:
        self.slots = [torch.zeros(words, dtype=torch.int32, device=place) for _ in range(RING)]
        self._side = SideStream()
        self._steps = self._side.steps
        self._moved = [torch.cuda.Event() for _ in range(RING)]  # type: ignore[no-untyped-call]
        """Recorded on the steps' stream once a slot's packet is in the fixed place."""
        self._side.follow_steps()  # the slots are zeroed there

    def bring(self, source: Tensor, slot: Tensor, target: Tensor, turn: int) -> None:
        if self._steps.query():  # nothing to go beside, and somebody may wait for a first token
            target.copy_(source, non_blocking=True)
            return
        self._side.wait_for(self._moved[turn])  # the slot's earlier packet has been read
        with self._side:
            slot.copy_(source, non_blocking=True)
        self._side.lead_steps()
        # In the steps' own order: behind the last kernel that reads the packet before, ahead of the first of this step.
        target.copy_(slot, non_blocking=True)
        self._moved[turn].record(self._steps)


class TokenRing:
    """The tokens that steps draw, int32: a line for each turn on the device, and a pinned one here.

    Nothing is written to a line while it is copied back: the next step has the next turn.
    """

    def __init__(self, max_rows: int, place: torch.device) -> None:
        self.on_device = torch.zeros(RING * max_rows, dtype=torch.int32, device=place)
        self._max_rows = max_rows
        self._lines = self.on_device.view(RING, max_rows).unbind()
        pinned = place.type == "cuda"
        self._host = [torch.zeros(max_rows, dtype=torch.int32, pin_memory=pinned) for _ in range(RING)]
        self._parts: dict[tuple[int, int], tuple[Tensor, Tensor, Int32s]] = {}
        """Of lines, cut once: every step would take as long for it as for a copy."""

    def start(self, turn: int) -> int:
        """Where the turn's line begins in `on_device`."""
        return turn * self._max_rows

    def line(self, turn: int, count: int) -> Tensor:
        return self._part(turn, count)[0]

    def host_line(self, turn: int, count: int) -> Tensor:
        return self._part(turn, count)[1]

    def host_view(self, turn: int, count: int) -> Int32s:
        """The same memory."""
        return self._part(turn, count)[2]

    def _part(self, turn: int, count: int) -> tuple[Tensor, Tensor, Int32s]:
        part = self._parts.get((turn, count))
        if part is None:
            host = self._host[turn][:count]
            self._parts[turn, count] = part = self._lines[turn][:count], host, host.numpy()
        return part
