"""A mesh of GPU ranks, one process each: sums stay in the order of a stream, so steps are queued and captured as on one
rank.

With a GPU for each rank they go through NCCL. Ranks that share a GPU exchange numbers through host memory that the GPU
sees, in a kernel of our own: NCCL refuses two ranks on one GPU. Two processes on a GPU take turns, so such ranks are
right and slow.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, distributed

from millrace.ops.base.mesh import T
from millrace.run.device.device import Device
from millrace.run.ranks.shared_mesh import HEAD_BYTES, SLOT_BYTES, MeshLink, RankLost, SharedMesh

_LOST_AT, _PORT_AT = HEAD_BYTES - 64, HEAD_BYTES - 128
_INT = struct.Struct("<i")
_MAPPED = 3
"""Flags of cudaHostRegister: for all contexts, and with an address on the device."""
START_LIMIT = timedelta(minutes=30)
"""Ranks may compile kernels before their first sum."""


class Carrier(Protocol):
    def sum(self, own: Tensor) -> Tensor:
        """float32 [n]. On every rank the same bits."""
        ...

    def abort(self) -> None:
        """A rank is lost: sums that wait for it end, with wrong numbers."""

    def release(self) -> None:
        """No step will follow. The process may open another mesh."""


class HostCarrier:
    """Through the memory that the ranks share."""

    def __init__(self, memory: Any, rank: int, size: int, device: torch.device) -> None:
        from millrace.ops.triton import rank_sum  # needs Triton

        self._ops = rank_sum
        self._rank = rank
        self._slot = SLOT_BYTES // 8
        self._device = device
        self._registered = 0
        if device.type == "cuda":
            whole = torch.frombuffer(memory, dtype=torch.uint8)
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            status = runtime.cudaHostRegister(whole.data_ptr(), len(whole), _MAPPED)
            if int(status):
                raise RuntimeError(f"The GPU cannot see memory that the ranks share: CUDA error {int(status)}.")
            self._registered = whole.data_ptr()
        words = torch.frombuffer(memory, dtype=torch.int64, count=2 * size * self._slot, offset=HEAD_BYTES)
        self._slots = words.view(2, size, self._slot)
        self._lost = torch.frombuffer(memory, dtype=torch.int32, count=1, offset=_LOST_AT)
        self._turns = rank_sum.new_turns(self._slot, device)

    def sum(self, own: Tensor) -> Tensor:
        out = torch.empty_like(own)
        for first in range(0, len(own), self._slot):
            part = slice(first, first + self._slot)
            self._ops.exchange(own[part], out[part], self._slots, self._turns, self._lost, self._rank)
        return out

    def abort(self) -> None:
        """Kernels that wait look at the memory."""

    def release(self) -> None:
        """The next mesh of this process may be mapped to the same place, which the GPU refuses to see twice."""
        registered, self._registered = self._registered, 0
        if registered:
            torch.cuda.synchronize(self._device)
            torch.cuda.cudart().cudaHostUnregister(registered)  # type: ignore[no-untyped-call]


class GroupCarrier:
    """Through a process group of torch.distributed."""

    def __init__(self, kind: Any, mesh: DeviceMesh) -> None:
        """`kind`: a class of process groups. The first sum connects the ranks."""
        self._make = partial(kind, mesh.store(), mesh.rank, mesh.size, START_LIMIT)
        self._group: Any = None

    def sum(self, own: Tensor) -> Tensor:
        if self._group is None:
            self._group = self._make()
        out = own.clone()
        self._group.allreduce([out]).wait()
        return out

    def abort(self) -> None:
        with suppress(Exception):  # It has no more to abort.
            self._group.abort()

    def release(self) -> None:
        """It has ended."""


def open_mesh(link: MeshLink, device: Device) -> SharedMesh:
    """The mesh of this rank. Rank 0 opens its own before the others start."""
    return SharedMesh(link) if device.torch_device.type == "cpu" else DeviceMesh(link, device.torch_device)


class DeviceMesh(SharedMesh):
    """`beat` also starts threads that notice a lost rank: the host waits for none. Then sums end, with wrong numbers,
    and who reads what a step gave must ask `check` first."""

    def __init__(
        self, link: MeshLink, device: torch.device, carrier: Callable[[DeviceMesh], Carrier] | None = None
    ) -> None:
        super().__init__(link)
        self.device = device
        self._carrier = (carrier or _carrier_of)(self)

    @property
    def lost(self) -> str:
        if not self._lost and _INT.unpack_from(self._memory, _LOST_AT)[0]:
            self._lost, self.found_ended = "A rank has ended.", True
        return self._lost

    def check(self) -> None:
        if reason := self.lost:
            raise RankLost(reason)

    def host_carrier(self) -> HostCarrier:
        return HostCarrier(self._memory, self.rank, self.size, self.device)

    def store(self) -> Any:
        """Where the processes of a group find each other."""
        is_first = self.rank == 0
        port = 0 if is_first else _INT.unpack_from(self._memory, _PORT_AT)[0]
        found = ("127.0.0.1", port, self.size, is_first, START_LIMIT)
        own = distributed.TCPStore(*found, wait_for_workers=False)  # type: ignore[attr-defined]
        if is_first:
            _INT.pack_into(self._memory, _PORT_AT, own.port)
        return own

    def beat(self) -> None:
        super().beat()
        for rank, source in self._sockets:
            threading.Thread(target=self._look_at, args=(rank, source), name=f"rank-{rank}-ends", daemon=True).start()

    def _look_at(self, rank: int, source: Any) -> None:
        with suppress(RankLost):
            self._receive(rank, source)  # Nothing is sent: it returns when the rank is lost.

    def _break(self, reason: str) -> NoReturn:
        self._lost = self._lost or reason
        self._abort()
        raise RankLost(self._lost)

    def close(self) -> None:
        super().close()
        self._abort()

    def release(self) -> None:
        self._carrier.release()

    def _abort(self) -> None:
        _INT.pack_into(self._memory, _LOST_AT, 1)
        self._carrier.abort()

    def step(self, work: Callable[[], T]) -> T:
        self.check()
        return work()

    def sum(self, x: Tensor) -> Tensor:
        return self._carrier.sum(x.contiguous().view(-1)).view(x.shape)

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """A sum with zeros, which is exact."""
        start = sum(widths[: self.rank])
        out = x.new_zeros((len(x), sum(widths)))
        out[:, start : start + widths[self.rank]] = x
        return self.sum(out)


def _carrier_of(mesh: DeviceMesh) -> Carrier:
    if torch.cuda.device_count() < mesh.size or not distributed.is_nccl_available():
        return mesh.host_carrier()
    return GroupCarrier(distributed.ProcessGroupNCCL, mesh)
