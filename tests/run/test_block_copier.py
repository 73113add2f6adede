"""Copies of blocks to host memory and back, on the CPU and on the GPU."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from millrace.config import RunConfig
from millrace.plan.step import BlockCopies
from millrace.run.device.block_copier import BlockCopier, OrderedCopier, StreamCopier
from millrace.run.device.device import Device, open_device
from millrace.run.device.host_blocks import HostBlocks

LAYERS, BLOCKS, SLOTS = 3, 12, 40


def make_pool(device: Device) -> list[torch.Tensor]:
    shape = (2, BLOCKS, 2, 16, 64)
    return [torch.randn(shape).to(torch.bfloat16).to(device.torch_device) for _ in range(LAYERS)]


def copies(to_host: bool, blocks: list[int], slots: list[int]) -> BlockCopies:
    on_device, on_host = np.asarray(blocks, np.int32), np.asarray(slots, np.int32)
    if to_host:
        return BlockCopies(0, "device", "host", on_device, on_host)
    return BlockCopies(0, "host", "device", on_host, on_device)


def check_round_trip(copier: BlockCopier, pool: list[torch.Tensor]) -> None:
    """Blocks leave in two batches, their memory is overwritten, and they return to other blocks."""
    before = [layer.clone() for layer in pool]
    leaving = [copier.copy(copies(True, [3, 1, 8], [5, 6, 39])), copier.copy(copies(True, [11, 2], [0, 38]))]
    for pending in leaving:
        assert pending.wait() > 0.0
        assert pending.done()
    for layer in pool:
        layer.zero_()
    if pool[0].is_cuda:
        torch.cuda.synchronize()
    copier.copy(copies(False, [4, 6, 7, 9], [39, 0, 38, 6])).wait()
    for layer, old in zip(pool, before, strict=True):
        assert torch.equal(layer[:, [4, 6, 7, 9]], old[:, [8, 11, 2, 1]])
        assert layer[:, [0, 1, 2, 3, 5, 8, 10, 11]].count_nonzero() == 0


def test_round_trip_on_the_cpu() -> None:
    device = open_device(RunConfig(device="cpu", threads=1))
    pool = make_pool(device)
    check_round_trip(OrderedCopier(pool, SLOTS, device), pool)
    device.close()


@pytest.mark.gpu
def test_round_trip_on_the_gpu() -> None:
    device = open_device(RunConfig(device="cuda"))
    pool = make_pool(device)
    check_round_trip(StreamCopier(pool, SLOTS, device, max_blocks=4), pool)
    device.close()


def test_a_failed_copy_raises_in_wait() -> None:
    device = open_device(RunConfig(device="cpu", threads=1))
    copier = OrderedCopier(make_pool(device), SLOTS, device)
    pending = copier.copy(copies(True, [3], [SLOTS]))
    with pytest.raises(IndexError):
        pending.wait()
    device.close()


def test_transfers_cover_runs_of_slots_within_a_chunk() -> None:
    host = HostBlocks(10, (2,), torch.int32)
    host.chunk_slots = 4
    slots = [1, 2, 3, 4, 5, 9, 8, 0]
    runs = list(host.runs_of(np.asarray(slots, np.int32)))
    assert runs == [(0, 1, 3), (3, 4, 2), (5, 9, 1), (6, 8, 1), (7, 0, 1)]


def test_pinned_memory_is_unpinned_before_its_addresses_are_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: set[int] = set()
    runtime = SimpleNamespace(
        cudaHostRegister=lambda at, size, _: pinned.add(at) or 0, cudaHostUnregister=pinned.remove
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr("millrace.run.device.host_blocks.CHUNK_BYTES", 16)
    host = HostBlocks(6, (2,), torch.int32, pinned_for=torch.device("cuda"))
    for thread in [thread for thread in threading.enumerate() if thread.name == "pin-host-blocks"]:
        thread.join(60)
    assert pinned == {chunk.data_ptr() for chunk in host.chunks}
    in_use = host.run(2, 2)
    address = in_use.data_ptr()
    del host
    assert pinned == {address}
    del in_use
    assert not pinned
