"""y = x W^T for an INT8 weight with a scale per output; rows of x are rounded to INT8."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace.ops.triton.dependent_launch import pdl_options, wait_for_previous_kernel
from millrace.ops.triton.gemm.tile_order import operand_rows, operand_tile, tile_places

INT8_MAX = 127.0
_BLOCK = 4096


@dataclass(frozen=True, slots=True)
class Int8Tiles:
    """`m` rows by `n` outputs by `k` inputs; `together`: tiles of rows that follow each other, so that weights stay in
    the L2 cache; `is_few`: outputs are the instruction's longer side; `split`: parts of a sum."""

    m: int
    n: int
    k: int = 128
    warps: int = 8
    stages: int = 3
    together: int = 8
    is_few: bool = False
    split: int = 1


@triton.jit
def _round_kernel(x_ptr, values_ptr, scales_ptr, K, x_stride, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    wait_for_previous_kernel(EARLY)
    row = tl.program_id(0).to(tl.int64)
    ids = tl.arange(0, BLOCK)
    highest = tl.zeros([BLOCK], tl.float32)
    for start in range(0, K, BLOCK):
        part = tl.load(x_ptr + row * x_stride + start + ids, mask=start + ids < K, other=0.0)
        highest = tl.maximum(highest, tl.abs(part.to(tl.float32)))
    largest = tl.max(highest, axis=0)
    tl.store(scales_ptr + row, largest / 127.0)
    inverse = 127.0 / tl.maximum(largest, 1.0e-30)
    for start in range(0, K, BLOCK):
        inside = start + ids < K
        part = tl.load(x_ptr + row * x_stride + start + ids, mask=inside, other=0.0).to(tl.float32) * inverse
        # Adding and subtracting 1.5 * 2^23 rounds to the nearest integer, halves to even.
        rounded = (part + 12582912.0) - 12582912.0
        tl.store(values_ptr + row * K + start + ids, rounded.to(tl.int8), mask=inside)


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [M, K] and the scale of each row, its largest magnitude / 127."""
    rows, inputs = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    values = torch.empty((rows, inputs), dtype=torch.int8, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        block = min(triton.next_power_of_2(inputs), _BLOCK)
        _round_kernel[(rows,)](
            x, values, scales, inputs, x.stride(0), BLOCK=block, num_warps=max(1, block // 512), **pdl_options(x.device)
        )  # fmt: skip
    return values, scales


@triton.jit
def _int8_kernel(
    x_ptr, w_ptr, x_scales_ptr, w_scales_ptr, bias_ptr, out_ptr, M, N, K, steps,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TOGETHER: tl.constexpr, FEW: tl.constexpr,
    WHOLE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel(EARLY)
    rows, outputs = tile_places(M, N, BM, BN, TOGETHER)
    x_rows, w_rows = operand_rows(x_ptr, rows, M, K), operand_rows(w_ptr, outputs, N, K)
    part = tl.program_id(1)
    acc = tl.zeros([BN, BM] if FEW else [BM, BN], tl.int32)
    for step in range(part * steps, tl.minimum((part + 1) * steps, tl.cdiv(K, BK))):
        inputs = step * BK + tl.arange(0, BK)
        x, w = operand_tile(x_rows, inputs, K, WHOLE), operand_tile(w_rows, inputs, K, WHOLE)
        if FEW:
            acc = tl.dot(w, tl.trans(x), acc, out_dtype=tl.int32)
        else:
            acc = tl.dot(x, tl.trans(w), acc, out_dtype=tl.int32)
    x_scales = tl.load(x_scales_ptr + rows, mask=rows < M, other=0.0)
    w_scales = tl.load(w_scales_ptr + outputs, mask=outputs < N, other=0.0).to(tl.float32)
    total = (tl.trans(acc) if FEW else acc).to(tl.float32) * x_scales[:, None] * w_scales[None, :]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + outputs, mask=outputs < N, other=0.0).to(tl.float32)[None, :]
    places = out_ptr + (part * M + rows).to(tl.int64)[:, None] * N + outputs[None, :]
    tl.store(places, total.to(out_ptr.dtype.element_ty), mask=(rows < M)[:, None] & (outputs < N)[None, :])


def multiply(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    tiles: Int8Tiles,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """x [M, K], codes int8 [N, K], scales [N]: [M, N] in `out_dtype`, by default that of x."""
    (rows, inputs), outputs, dtype = x.shape, codes.shape[0], out_dtype or x.dtype
    is_split = tiles.split > 1
    parts = torch.empty((tiles.split, rows, outputs), dtype=torch.float32 if is_split else dtype, device=x.device)
    if rows == 0:
        return parts[0].to(dtype)
    values, x_scales = round_rows(x)
    _int8_kernel[(triton.cdiv(rows, tiles.m) * triton.cdiv(outputs, tiles.n), tiles.split)](
        values, codes, x_scales, scales, None if is_split else bias, parts, rows, outputs, inputs,
        triton.cdiv(triton.cdiv(inputs, tiles.k), tiles.split),
        BM=tiles.m, BN=tiles.n, BK=tiles.k, TOGETHER=tiles.together, FEW=tiles.is_few, WHOLE=inputs % tiles.k == 0,
        num_warps=tiles.warps, num_stages=tiles.stages, **pdl_options(x.device),
    )  # fmt: skip
    if not is_split:
        return parts[0]
    total = parts.sum(dim=0)
    return (total if bias is None else total + bias.float()).to(dtype)


def choose_tiles(rows: int, outputs: int, inputs: int, is_large: bool = True) -> Int8Tiles:
    """`is_large`: for the shared memory of Hopper."""
    if rows <= 32:
        split = 2 if inputs >= 8192 and outputs <= 8192 else 1
        k = 256 if is_large else 128
        return Int8Tiles(16 if rows <= 16 else 32, 64, k=k, warps=4, stages=4, is_few=True, split=split)
    if not is_large:
        return Int8Tiles(64 if rows <= 128 else 128, 128, k=64)
    if rows <= 64:
        return Int8Tiles(64, 64, k=256, warps=4, stages=4)
    if rows <= 128:
        return Int8Tiles(64, 128, warps=4, stages=4)
    return Int8Tiles(128, 128, stages=4) if rows <= 512 else Int8Tiles(128, 256)
