"""Executes `BlockCopies`: copies of whole blocks between the KV pool and host memory.

On a CPU they run in launch order with the steps. On a GPU they run beside the steps, one stream per direction. Nothing
orders them with steps there, and nothing has to: blocks that leave were filled by steps that are confirmed, and
blocks that arrive are used only by steps launched after the copies are acknowledged.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from millrace.ops.kv.whole_blocks import CpuBlocks, block_parts, buffer_shape, gather_blocks, scatter_blocks
from millrace.plan.step import BlockCopies, Int32s
from millrace.run.device.device import Device, Pending
from millrace.run.device.host_blocks import HostBlocks
from millrace.run.device.side_stream import SideStream


class BlockCopier(Protocol):
    @property
    def host_blocks(self) -> tuple[HostBlocks, ...]:
        """The host memory: of a block one part in each, if several pools are copied."""

    def copy(self, copies: BlockCopies) -> Pending[float]:
        """Start the copies. The result is the number of seconds that they took."""


def leaves(copies: BlockCopies) -> bool:
    """True if the blocks go from the device to host memory, False if they return."""
    if {copies.source, copies.target} != {"device", "host"}:
        raise ValueError(f"a runner copies between device and host, not from {copies.source} to {copies.target}")
    return copies.source == "device"


def places(copies: BlockCopies) -> tuple[Int32s, Int32s]:
    """Ids on the device and slots in host memory."""
    return (copies.blocks, copies.slots) if leaves(copies) else (copies.slots, copies.blocks)


class OrderedCopier:
    """Copies in launch order with the steps."""

    def __init__(self, kv: Sequence[Tensor], num_slots: int, device: Device) -> None:
        self._device = device
        self._parts = block_parts(kv)
        host = HostBlocks(num_slots, buffer_shape(self._parts), self._parts[0].dtype)
        self.host_blocks = (host,)
        (self._host,) = host.chunks
        self._on_cpu = CpuBlocks(self._parts, self._host) if device.kind == "cpu" else None

    def copy(self, copies: BlockCopies) -> Pending[float]:
        def work() -> float:
            began = time.perf_counter()
            self.copy_blocks(copies)
            return time.perf_counter() - began

        return self._device.launch(work, lambda seconds: seconds)

    def copy_blocks(self, copies: BlockCopies) -> None:
        if self._on_cpu is not None:
            run = self._on_cpu.gather if leaves(copies) else self._on_cpu.scatter
            run(*places(copies))
            return
        on_device, on_host = places(copies)
        blocks, slots = self._device.upload(on_device), torch.from_numpy(on_host).long()
        if leaves(copies):
            buffer = self._parts[0].new_empty((len(slots), *self._host.shape[1:]))
            gather_blocks(self._parts, blocks, buffer)
            self._host[slots] = buffer.cpu()
        else:
            scatter_blocks(self._parts, blocks, self._host[slots].to(blocks.device))


class StreamCopier:
    """Copies beside the steps: one kernel between the pool and a device buffer, and one transfer per run of slots."""

    def __init__(self, kv: Sequence[Tensor], num_slots: int, device: Device, *, max_blocks: int) -> None:
        """`max_blocks`: maximum number of blocks in a batch."""
        from millrace.ops.triton.whole_blocks import addresses_of, copy_blocks  # needs Triton

        self._device = device
        self._parts = block_parts(kv)
        self._copy_blocks = copy_blocks
        self._addresses = addresses_of(self._parts)
        shape, dtype = buffer_shape(self._parts), self._parts[0].dtype
        self._host = HostBlocks(num_slots, shape, dtype, pinned_for=device.torch_device)
        self.host_blocks = (self._host,)
        self._out, self._in = (_Lane((max_blocks, *shape), dtype, device) for _ in range(2))
        self._compile()

    def _compile(self) -> None:
        """Compile the kernels now, by copying the scratch block: the first batch must not hold up the steps."""
        scratch, buffer = torch.zeros(1, dtype=torch.int32, device=self._parts[0].device), self._out.buffer
        for to_buffer in (True, False):
            self._copy_blocks(self._addresses, self._parts[0], scratch, buffer, to_buffer=to_buffer)

    def copy(self, copies: BlockCopies) -> Pending[float]:
        lane, (on_device_ids, slots) = self._out if leaves(copies) else self._in, places(copies)
        buffer = lane.buffer
        began, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.inference_mode(), lane.stream:
            lane.stream.record(began)
            blocks = self._device.upload(on_device_ids)
            if leaves(copies):
                self._copy_blocks(self._addresses, self._parts[0], blocks, buffer, to_buffer=True)
            for first, slot, count in self._host.runs_of(slots):
                on_device, on_host = buffer[first : first + count], self._host.run(slot, count)
                if leaves(copies):
                    on_host.copy_(on_device, non_blocking=True)
                else:
                    on_device.copy_(on_host, non_blocking=True)
            if not leaves(copies):
                self._copy_blocks(self._addresses, self._parts[0], blocks, buffer, to_buffer=False)
            lane.stream.record(done)
        return _EventPending(began, done, blocks)


class JointCopier:
    """Copies the same blocks of several pools: those of a model and of its drafter, if it has one."""

    def __init__(self, copiers: Sequence[BlockCopier]) -> None:
        self._copiers = copiers

    @property
    def host_blocks(self) -> tuple[HostBlocks, ...]:
        return tuple(host for copier in self._copiers for host in copier.host_blocks)

    def copy(self, copies: BlockCopies) -> Pending[float]:
        return _JointPending([copier.copy(copies) for copier in self._copiers])


class _JointPending:
    def __init__(self, parts: Sequence[Pending[float]]) -> None:
        self._parts = parts

    def done(self) -> bool:
        return all(part.done() for part in self._parts)

    def wait(self) -> float:
        return sum([part.wait() for part in self._parts])


class _Lane:
    """The stream of one direction, and its buffer: batches of one direction follow each other on the stream."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: Device) -> None:
        self.stream = SideStream()
        self.buffer = torch.empty(shape, dtype=dtype, device=device.torch_device)


class _EventPending:
    def __init__(self, began: torch.cuda.Event, done: torch.cuda.Event, blocks: Tensor) -> None:
        self._began = began
        self._done = done
        self._blocks = blocks  # the ids must live until the kernel has read them

    def done(self) -> bool:
        return bool(self._done.query())  # type: ignore[no-untyped-call]

    def wait(self) -> float:
        self._done.synchronize()
        return float(self._began.elapsed_time(self._done)) / 1e3
