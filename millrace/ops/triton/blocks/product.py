"""y = x W^T for a weight of GGUF blocks: a kernel for few rows, and the whole weight decoded for many."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import gguf
import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace.ops.triton.blocks.decode import KINDS, BlockKind, decode_tile
from millrace.ops.triton.dependent_launch import pdl_options, wait_for_previous_kernel

DEPTH = 128
"""Inputs of a tile: whole groups of every format."""


@dataclass(frozen=True, slots=True)
class BlockOperand:
    """A weight [N, K] as the kernels read it."""

    blocks: Tensor
    """uint8 [N, bytes of a row]"""
    table: Tensor
    """int8: the format's table of numbers; any byte if it has none."""
    kind: BlockKind
    outputs: int
    inputs: int


@functools.cache
def table_of(kind: str, device: torch.device) -> Tensor:
    """int8: the numbers that a format's codes point at; one zero for formats without such a table."""
    if kind in ("IQ4_NL", "IQ4_XS"):
        numbers = np.array(gguf.quants.IQ4_NL.kvalues, dtype=np.int8)
    elif kind.startswith("IQ"):
        name = "IQ1_S" if kind == "IQ1_M" else kind
        reference = getattr(gguf.quants, name)
        reference.init_grid()
        numbers = reference.grid.reshape(-1).astype(np.int8)
    else:
        numbers = np.zeros(1, dtype=np.int8)
    return torch.from_numpy(numbers).to(device)


def operand(kind: str, blocks: Tensor, inputs: int) -> BlockOperand:
    return BlockOperand(blocks, table_of(kind, blocks.device), KINDS[kind], blocks.shape[0], inputs)


@triton.jit
def _product_kernel(
    x_ptr, blocks_ptr, table_ptr, bias_ptr, out_ptr, M, N, K, x_stride, row_bytes, steps,
    KIND: tl.constexpr, ITEMS: tl.constexpr, BYTES: tl.constexpr, GROUP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel(EARLY)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    outputs = tl.program_id(1) * BN + tl.arange(0, BN)
    part = tl.program_id(2)
    own = tl.minimum(outputs, N - 1).to(tl.int64)
    x_rows = x_ptr + rows.to(tl.int64)[:, None] * x_stride
    acc = tl.zeros([BM, BN], tl.float32)
    for step in range(part * steps, (part + 1) * steps):
        inputs = step * BK + tl.arange(0, BK)
        x = tl.load(x_rows + inputs[None, :], mask=(rows < M)[:, None] & (inputs < K)[None, :], other=0.0)
        tile = decode_tile(
            blocks_ptr, own, step * BK, N, K, row_bytes, table_ptr, KIND, ITEMS, BYTES, GROUP, BN, BK
        )  # fmt: skip
        acc = tl.dot(x, tl.trans(tile.to(x.dtype)), acc)
    inside = (rows < M)[:, None] & (outputs < N)[None, :]
    if SPLIT == 1 and bias_ptr is not None:
        acc += tl.load(bias_ptr + own).to(tl.float32)[None, :]
    places = (part.to(tl.int64) * M + rows.to(tl.int64)[:, None]) * N + outputs[None, :]
    tl.store(out_ptr + places, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _decode_kernel(
    blocks_ptr, table_ptr, out_ptr, N, K, row_bytes,
    KIND: tl.constexpr, ITEMS: tl.constexpr, BYTES: tl.constexpr, GROUP: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    outputs = tl.program_id(0) * BN + tl.arange(0, BN)
    own = tl.minimum(outputs, N - 1).to(tl.int64)
    first = tl.program_id(1) * BK
    tile = decode_tile(
        blocks_ptr, own, first, N, K, row_bytes, table_ptr, KIND, ITEMS, BYTES, GROUP, BN, BK
    )  # fmt: skip
    inputs = first + tl.arange(0, BK)
    inside = (outputs < N)[:, None] & (inputs < K)[None, :]
    tl.store(out_ptr + own[:, None] * K + inputs[None, :], tile.to(out_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class BlockTiles:
    """`m` rows by `n` outputs; `split`: parts of a sum."""

    m: int
    n: int
    split: int
    warps: int = 4
    stages: int = 2


def multiply(
    x: Tensor,
    weight: BlockOperand,
    tiles: BlockTiles,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """x [M, K] W^T + bias, [M, N] in `out_dtype`, by default that of x."""
    rows, outputs, kind = x.shape[0], weight.outputs, weight.kind
    dtype = out_dtype or x.dtype
    if rows == 0:
        return torch.empty((0, outputs), dtype=dtype, device=x.device)
    x = x if x.stride(1) == 1 else x.contiguous()
    steps = triton.cdiv(triton.cdiv(weight.inputs, DEPTH), tiles.split)
    kept = dtype if tiles.split == 1 else torch.float32
    parts = torch.empty((tiles.split, rows, outputs), dtype=kept, device=x.device)
    _product_kernel[(triton.cdiv(rows, tiles.m), triton.cdiv(outputs, tiles.n), tiles.split)](
        x, weight.blocks, weight.table, bias, parts, rows, outputs, weight.inputs, x.stride(0), weight.blocks.shape[1],
        steps, KIND=kind.code, ITEMS=kind.items, BYTES=kind.num_bytes, GROUP=kind.group,
        BM=tiles.m, BN=tiles.n, BK=DEPTH, SPLIT=tiles.split, num_warps=tiles.warps, num_stages=tiles.stages,
        **pdl_options(x.device),
    )  # fmt: skip
    if tiles.split == 1:
        return parts[0]
    total = parts.sum(dim=0)
    return (total if bias is None else total + bias.float()).to(dtype)


def decode(weight: BlockOperand, dtype: torch.dtype, first: int = 0, last: int | None = None) -> Tensor:
    """Outputs first to last [N, K] as numbers."""
    kind, blocks = weight.kind, weight.blocks[first:last]
    out = torch.empty((blocks.shape[0], weight.inputs), dtype=dtype, device=blocks.device)
    _decode_kernel[(triton.cdiv(blocks.shape[0], 32), triton.cdiv(weight.inputs, DEPTH))](
        blocks, weight.table, out, blocks.shape[0], weight.inputs, blocks.shape[1],
        KIND=kind.code, ITEMS=kind.items, BYTES=kind.num_bytes, GROUP=kind.group, BN=32, BK=DEPTH,
        num_warps=4,
    )  # fmt: skip
    return out


def choose_tiles(rows: int, outputs: int, inputs: int, programs: int) -> BlockTiles:
    """Few rows split their sums so that there are about `programs` programs."""
    m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    return BlockTiles(m, 32, _split(rows, m, outputs, inputs, programs))


def fixed_tiles(outputs: int, inputs: int, programs: int) -> BlockTiles:
    """The same for any number of rows."""
    return BlockTiles(32, 32, _split(1, 32, outputs, inputs, programs))


def _split(rows: int, m: int, outputs: int, inputs: int, programs: int) -> int:
    made = triton.cdiv(max(1, rows), m) * triton.cdiv(outputs, 32)
    return int(max(1, min(8, programs // made, inputs // (4 * DEPTH))))
