"""Whole blocks of the KV pool: the CPU version and the Triton kernel against the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.triton_mode import device

from millrace.ops.kv.whole_blocks import CpuBlocks, block_parts, buffer_shape, gather_blocks, scatter_blocks
from millrace.ops.triton.whole_blocks import addresses_of, copy_blocks

LAYERS, BLOCKS = 3, 9
BLOCK_IDS, OTHER_IDS = [7, 1, 4, 8], [2, 3, 5, 6]
SHAPES = [
    ((2, 16, 32), torch.bfloat16),
    ((2, 16, 36), torch.uint8),
    ((1, 4, 26), torch.int16),
    ((3, 1, 7), torch.int8),
    ((8, 16, 64), torch.float32),
]


def make_pool(shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    num_bytes = shape[-1] * dtype.itemsize
    raw = [torch.randint(0, 256, (2, BLOCKS, *shape[:-1], num_bytes), generator=generator) for _ in range(LAYERS)]
    return [layer.to(torch.uint8).to(device).view(dtype) for layer in raw]


def as_bytes(pool: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([layer.view(torch.uint8) for layer in pool])


@pytest.mark.parametrize(("shape", "dtype"), SHAPES, ids=str)
def test_blocks_leave_and_return(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    pool = make_pool(shape, dtype)
    before, parts = as_bytes(pool).clone(), block_parts(pool)
    buffer = torch.zeros((6, *buffer_shape(parts)), dtype=parts[0].dtype, device=device)
    blocks, others = torch.tensor(BLOCK_IDS, device=device), torch.tensor(OTHER_IDS, device=device)
    gather_blocks(parts, blocks, buffer)
    for place, block in enumerate(BLOCK_IDS):
        expected = torch.stack([part[:, block] for part in parts])
        assert torch.equal(buffer[place], expected), "a place holds both parts of every layer, one after the other"
    scatter_blocks(parts, others, buffer)
    after = as_bytes(pool)
    assert torch.equal(after[:, :, others], before[:, :, blocks])
    untouched = [0, *BLOCK_IDS]
    assert torch.equal(after[:, :, untouched], before[:, :, untouched])


@pytest.mark.parametrize(("shape", "dtype"), SHAPES, ids=str)
def test_cpu_version_equals_the_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    pool = [layer.cpu() for layer in make_pool(shape, dtype)]
    parts, places = block_parts(pool), [5, 0, 3, 2]
    buffer = torch.zeros((6, *buffer_shape(parts)), dtype=parts[0].dtype)
    expected = torch.zeros_like(buffer)
    gather_blocks(parts, torch.tensor(BLOCK_IDS), expected)
    cpu = CpuBlocks(parts, buffer)
    cpu.gather(np.asarray(BLOCK_IDS, np.int32), np.asarray(places, np.int32))
    assert expected.count_nonzero() > 0
    assert torch.equal(buffer[places], expected[: len(places)])
    assert buffer[[1, 4]].count_nonzero() == 0
    reference = [layer.clone() for layer in pool]
    scatter_blocks(block_parts(reference), torch.tensor(OTHER_IDS), expected)
    cpu.scatter(np.asarray(OTHER_IDS, np.int32), np.asarray(places, np.int32))
    assert torch.equal(as_bytes(pool), as_bytes(reference))


@pytest.mark.parametrize(("shape", "dtype"), SHAPES, ids=str)
def test_kernel_equals_the_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    pool = make_pool(shape, dtype)
    parts = block_parts(pool)
    buffer = torch.zeros((6, *buffer_shape(parts)), dtype=parts[0].dtype, device=device)
    expected, ids = torch.zeros_like(buffer), torch.tensor(BLOCK_IDS, dtype=torch.int32, device=device)
    gather_blocks(parts, ids.long(), expected)
    copy_blocks(addresses_of(parts), parts[0], ids, buffer, to_buffer=True)
    assert buffer.count_nonzero() > 0
    assert torch.equal(buffer, expected)
    others = torch.tensor(OTHER_IDS, dtype=torch.int32, device=device)
    reference = [layer.clone() for layer in pool]
    scatter_blocks(block_parts(reference), others.long(), buffer)
    copy_blocks(addresses_of(parts), parts[0], others, buffer, to_buffer=False)
    assert torch.equal(as_bytes(pool), as_bytes(reference))
