"""The mesh of ranks on one machine: numbers in shared memory, and a byte over a socket that says they are there.

Each pair of ranks has a socket. It wakes the reader, orders the memory of both processes, and closes when either of
them ends. A rank writes its numbers to its slot, sends a byte to the others, waits for theirs, and adds all slots in
the order of ranks, so all get the same bits. Two sets of slots take turns: when a rank writes to a set again, all
others have sent the byte after it, and read it no more.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import torch
from torch import Tensor

from millrace.errors import EngineUnavailable
from millrace.ops.base.mesh import Mesh, T
from millrace.run.ranks.ring import shared_memory

SLOT_BYTES = 4 << 20
BEAT_S = 0.5
STALL_BEATS = 10
"""Waits of `BEAT_S` in which a rank does not beat, after which it has stalled. They are counted, not timed: when the
whole machine stands still, no rank has stalled."""
HEAD_BYTES, _BEAT_STRIDE = 4096, 64
_BEAT = struct.Struct("<Q")
_WAIT = struct.pack("ll", 0, int(BEAT_S * 1e6))
"""Seconds and microseconds."""
NUMBERS, ENDED, FAILED = b"n", b"e", b"f"
"""What a rank sends: its numbers are there; its step ended; its step failed."""


class RankLost(EngineUnavailable):
    """A rank ended, stalled, or failed alone: the ranks cannot go on."""


@dataclass(slots=True)
class MeshLink:
    """What a rank of a mesh is made with. All ranks of one process share it; another process gets the descriptors."""

    rank: int
    memory_fd: int
    sockets: dict[int, socket.socket]
    """By rank."""

    @property
    def size(self) -> int:
        return len(self.sockets) + 1

    def fds(self) -> list[int]:
        """Of the memory, then of the sockets in the order of ranks."""
        return [self.memory_fd, *(self.sockets[rank].fileno() for rank in sorted(self.sockets))]

    @classmethod
    def from_fds(cls, rank: int, memory_fd: int, socket_fds: Sequence[int]) -> MeshLink:
        others = [other for other in range(len(socket_fds) + 1) if other != rank]
        return cls(
            rank, memory_fd, {other: socket.socket(fileno=fd) for other, fd in zip(others, socket_fds, strict=True)}
        )

    def close(self) -> None:
        for own in self.sockets.values():
            own.close()
        os.close(self.memory_fd)


def make_links(size: int) -> list[MeshLink]:
    """Of all ranks, in their order."""
    fd = shared_memory(HEAD_BYTES + 2 * size * SLOT_BYTES)
    links = [MeshLink(rank, os.dup(fd), {}) for rank in range(size)]
    os.close(fd)
    for first in links:
        for second in links[first.rank + 1 :]:
            first.sockets[second.rank], second.sockets[first.rank] = socket.socketpair()
    return links


@dataclass(slots=True)
class Beats:
    """Whether other ranks are alive: how often each was found not to have beaten."""

    memory: mmap.mmap
    _last: dict[int, int] = field(default_factory=dict)
    _missed: dict[int, int] = field(default_factory=dict)

    def has_stalled(self, rank: int) -> bool:
        """Call it once every `BEAT_S`."""
        (beat,) = _BEAT.unpack_from(self.memory, rank * _BEAT_STRIDE)
        stands = beat > 0 and beat == self._last.get(rank)  # 0: it is still loading.
        self._missed[rank] = self._missed.get(rank, 0) + 1 if stands else 0
        self._last[rank] = beat
        return self._missed[rank] >= STALL_BEATS


class SharedMesh(Mesh):
    """Steps run on one thread. `beat` starts a thread that shows the other ranks that this one is alive."""

    def __init__(self, link: MeshLink) -> None:
        self.rank = link.rank
        self.size = link.size
        self._link = link
        self._memory = mmap.mmap(link.memory_fd, HEAD_BYTES + 2 * self.size * SLOT_BYTES)
        items = SLOT_BYTES // 4
        self._slots = [
            [
                torch.frombuffer(self._memory, dtype=torch.float32, count=items, offset=HEAD_BYTES + at * SLOT_BYTES)
                for at in range(part * self.size, (part + 1) * self.size)
            ]
            for part in (0, 1)
        ]
        self._turn = 0
        self._beats = Beats(self._memory)
        self._sockets = [(rank, link.sockets[rank]) for rank in sorted(link.sockets)]
        for _, own in self._sockets:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _WAIT)
        self._closing = threading.Event()
        self._lost = ""
        self.found_ended = False
        """True if a step has found that another rank ended."""

    @property
    def beats(self) -> Beats:
        """For another thread than that of the steps."""
        return Beats(self._memory)

    @property
    def lost(self) -> str:
        """Why no step can run any more; empty while they can."""
        return self._lost

    def check(self) -> None:
        """Raises `RankLost` if a step may have given wrong numbers: only where the host does not wait for sums."""

    def beat(self) -> None:
        threading.Thread(target=self._keep_beating, name="rank-beat", daemon=True).start()

    def _keep_beating(self) -> None:
        count = 0
        while True:
            count += 1
            _BEAT.pack_into(self._memory, self.rank * _BEAT_STRIDE, count)
            if self._closing.wait(BEAT_S):
                return

    def close(self) -> None:
        """The others find it ended. Waits that go on raise `RankLost`."""
        self._lost = self._lost or "the ranks are being closed"
        self._closing.set()
        for _, own in self._sockets:
            with contextlib.suppress(OSError):  # The other end has closed.
                own.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """After `close`, when no step can follow: gives back what the mesh holds."""

    # -- steps -----------------------------------------------------------------------------------------------------

    def step(self, work: Callable[[], T]) -> T:
        if self._lost:
            raise RankLost(self._lost)
        try:
            result = work()
        except RankLost:
            raise
        except Exception:
            self._agree(FAILED)
            raise
        self._agree(ENDED)
        return result

    def _agree(self, own: bytes) -> None:
        """Learn how the step ended on the other ranks. Raises `RankLost` unless it did so in the same way."""
        self._send(own)
        for rank, source in self._sockets:
            found = self._receive(rank, source)
            if found != own:
                self._failed_alone(self.rank if own == FAILED else rank)

    def _failed_alone(self, rank: int) -> NoReturn:
        self._break(f"A step failed on rank {rank} of {self.size} and not on the others.")

    def _break(self, reason: str) -> NoReturn:
        self._lost = self._lost or reason
        raise RankLost(self._lost)

    # -- numbers ---------------------------------------------------------------------------------------------------

    def sum(self, x: Tensor) -> Tensor:
        own = x.contiguous().view(-1)
        out = torch.empty_like(own)
        most = SLOT_BYTES // 4
        for start in range(0, len(own), most):
            part, total = own[start : start + most], out[start : start + most]
            slots = self._exchange(part)
            torch.add(slots[0][: len(part)], slots[1][: len(part)], out=total)
            for slot in slots[2:]:
                total += slot[: len(part)]
        return out.view(x.shape)

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        out = torch.empty((len(x), sum(widths)), dtype=torch.float32)
        most = SLOT_BYTES // 4 // max(widths)
        for first in range(0, len(x), most):
            part = x[first : first + most]
            start, rows = 0, len(part)
            for slot, width in zip(self._exchange(part.reshape(-1)), widths, strict=True):
                out[first : first + rows, start : start + width] = slot[: rows * width].view(rows, width)
                start += width
        return out

    def _exchange(self, own: Tensor) -> list[Tensor]:
        """The slots of all ranks with their numbers."""
        slots = self._slots[self._turn]
        self._turn ^= 1
        slots[self.rank][: len(own)].copy_(own)
        self._send(NUMBERS)
        for rank, source in self._sockets:
            if self._receive(rank, source) != NUMBERS:
                self._failed_alone(rank)
        return slots

    def _send(self, what: bytes) -> None:
        for rank, target in self._sockets:
            try:
                target.sendall(what)
            except OSError:
                self._break(self._ended(rank))

    def _receive(self, rank: int, source: socket.socket) -> bytes:
        while True:
            try:
                found = source.recv(1)
            except BlockingIOError:
                if self._lost:
                    raise RankLost(self._lost) from None
                if self._beats.has_stalled(rank):
                    self._break(
                        f"Rank {rank} of {self.size} has stalled: no sign of it for {BEAT_S * STALL_BEATS:g} s."
                    )
                continue
            except OSError:
                found = b""
            if not found:
                self._break(self._ended(rank))
            return found

    def _ended(self, rank: int) -> str:
        self.found_ended = True
        return f"Rank {rank} of {self.size} has ended."
