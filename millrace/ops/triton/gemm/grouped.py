"""Products with weights of small codes with a scale per group of inputs; see `ops/linear/grouped.py` for their meaning.

A tile of codes is dequantised in registers and multiplied by the tensor cores. Sums may be split into parts along the
inputs, which are added in a fixed order afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace.ops.triton.dependent_launch import pdl_options, wait_for_previous_kernel

MAX_TILE_K = 128


@dataclass(frozen=True, slots=True)
class GroupedTiles:
    """`m` rows by `n` outputs by `k` inputs; `split`: parts of a sum."""

    m: int
    n: int
    k: int
    split: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class GroupedOperand:
    """The tensors of a weight [N, K] as the kernel reads them."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    levels: Tensor | None
    output_scales: Tensor | None
    offsets: Tensor | None
    outputs: int
    inputs: int
    group: int
    rows_per_scale: int
    zero: int
    is_four_bits: bool


@triton.jit
def _level_of(levels_ptr, codes):
    """levels[codes] of 16 levels, by comparisons: loads from computed places took 20 times as long on an H200."""
    one, two, four, eight = (codes & 1) != 0, (codes & 2) != 0, (codes & 4) != 0, (codes & 8) != 0
    first = tl.where(two, _either(levels_ptr + 2, one), _either(levels_ptr, one))
    second = tl.where(two, _either(levels_ptr + 6, one), _either(levels_ptr + 4, one))
    third = tl.where(two, _either(levels_ptr + 10, one), _either(levels_ptr + 8, one))
    fourth = tl.where(two, _either(levels_ptr + 14, one), _either(levels_ptr + 12, one))
    return tl.where(eight, tl.where(four, fourth, third), tl.where(four, second, first))


@triton.jit
def _either(pair_ptr, is_second):
    return tl.where(is_second, tl.load(pair_ptr + 1), tl.load(pair_ptr))


@triton.jit
def grouped_tile(
    codes_ptr, scales_ptr, zeros_ptr, levels_ptr, offsets_ptr, outputs, in_outputs, first, K, num_groups,
    rows_per_scale, group, zero,
    BN: tl.constexpr, BK: tl.constexpr, GROUPS: tl.constexpr, FOUR_BITS: tl.constexpr, EXPONENTS: tl.constexpr,
):  # fmt: skip
    """float32 [BN, BK]: the weights of these outputs (int64) from input `first` on, without their output scales."""
    code_columns = K // 2 if FOUR_BITS else K
    code_rows = codes_ptr + outputs[:, None] * code_columns
    scale_rows = (outputs // rows_per_scale)[:, None] * num_groups
    group_rows = outputs[:, None] * num_groups
    if FOUR_BITS:
        pairs = first // 2 + tl.arange(0, BK // 2)
        packed = tl.load(code_rows + pairs[None, :], mask=in_outputs[:, None] & (2 * pairs < K)[None, :], other=0)
        codes = tl.reshape(tl.join(packed & 15, packed >> 4), [BN, BK])
    else:
        inputs = first + tl.arange(0, BK)
        codes = tl.load(code_rows + inputs[None, :], mask=in_outputs[:, None] & (inputs < K)[None, :], other=0.0)
    if levels_ptr is not None:
        if FOUR_BITS:
            weights = _level_of(levels_ptr, codes)
        else:
            weights = tl.load(levels_ptr + codes.to(tl.int32))
    else:
        weights = codes.to(tl.float32)
    weights = tl.reshape(weights, [BN, GROUPS, BK // GROUPS])
    groups = (first + tl.arange(0, GROUPS) * (BK // GROUPS)) // group
    inside = in_outputs[:, None] & (groups < num_groups)[None, :]
    if zeros_ptr is not None:
        zeros = tl.load(zeros_ptr + group_rows + groups[None, :], mask=inside, other=0).to(tl.float32)
        weights -= zeros[:, :, None]
    else:
        weights -= zero
    scales = tl.load(scales_ptr + scale_rows + groups[None, :], mask=inside, other=0.0)
    if EXPONENTS:
        # 2^-127 is not a normal float32; tiny weights become zero.
        scales = (scales.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    weights *= scales.to(tl.float32)[:, :, None]
    if offsets_ptr is not None:
        weights += tl.load(offsets_ptr + group_rows + groups[None, :], mask=inside, other=0.0).to(tl.float32)[
            :, :, None
        ]
    return tl.reshape(weights, [BN, BK])


@triton.jit
def _grouped_kernel(
    x_ptr, codes_ptr, scales_ptr, zeros_ptr, levels_ptr, output_scales_ptr, offsets_ptr, bias_ptr, out_ptr,
    M, N, K, x_stride, num_groups, rows_per_scale, group, steps, zero,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUPS: tl.constexpr, SPLIT: tl.constexpr,
    FOUR_BITS: tl.constexpr, EXPONENTS: tl.constexpr, WHOLE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel(EARLY)
    # Programs that share outputs follow each other, so that codes stay in the L2 cache.
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    outputs = tl.program_id(1) * BN + tl.arange(0, BN)
    part = tl.program_id(2)
    in_rows, in_outputs = rows < M, outputs < N
    x_rows = x_ptr + rows.to(tl.int64)[:, None] * x_stride
    acc = tl.zeros([BM, BN], tl.float32)
    for step in range(part * steps, (part + 1) * steps):
        first = step * BK
        inputs = first + tl.arange(0, BK)
        if WHOLE:
            x = tl.load(x_rows + inputs[None, :], mask=in_rows[:, None], other=0.0)
        else:
            x = tl.load(x_rows + inputs[None, :], mask=in_rows[:, None] & (inputs < K)[None, :], other=0.0)
        tile = grouped_tile(
            codes_ptr, scales_ptr, zeros_ptr, levels_ptr, offsets_ptr, outputs.to(tl.int64), in_outputs, first, K,
            num_groups, rows_per_scale, group, zero, BN, BK, GROUPS, FOUR_BITS, EXPONENTS,
        )  # fmt: skip
        acc = tl.dot(x, tl.trans(tile.to(x.dtype)), acc)
    if output_scales_ptr is not None:
        acc *= tl.load(output_scales_ptr + outputs, mask=in_outputs, other=0.0)[None, :]
    if SPLIT == 1 and bias_ptr is not None:
        acc += tl.load(bias_ptr + outputs, mask=in_outputs, other=0.0).to(tl.float32)[None, :]
    out_rows = out_ptr + (part.to(tl.int64) * M + rows.to(tl.int64)[:, None]) * N
    tl.store(out_rows + outputs[None, :], acc.to(out_ptr.dtype.element_ty), mask=in_rows[:, None] & in_outputs[None, :])


def grouped_product(
    x: Tensor,
    weight: GroupedOperand,
    tiles: GroupedTiles,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """x [M, K] W^T + bias, [M, N] in `out_dtype`, by default that of x."""
    if x.stride(1) != 1:
        x = x.contiguous()
    rows, outputs = x.shape[0], weight.outputs
    dtype = out_dtype or x.dtype
    if rows == 0:
        return torch.empty((0, outputs), dtype=dtype, device=x.device)
    steps = triton.cdiv(triton.cdiv(weight.inputs, tiles.k), tiles.split)
    parts = torch.empty(
        (tiles.split, rows, outputs), dtype=dtype if tiles.split == 1 else torch.float32, device=x.device
    )
    grid = (triton.cdiv(rows, tiles.m), triton.cdiv(outputs, tiles.n), tiles.split)
    _grouped_kernel[grid](
        x,
        weight.codes,
        weight.scales,
        weight.zeros,
        weight.levels,
        weight.output_scales,
        weight.offsets,
        bias,
        parts,
        rows,
        outputs,
        weight.inputs,
        x.stride(0),
        weight.scales.shape[1],
        weight.rows_per_scale,
        weight.group,
        steps,
        weight.zero,
        BM=tiles.m,
        BN=tiles.n,
        BK=tiles.k,
        GROUPS=max(1, tiles.k // weight.group),
        SPLIT=tiles.split,
        FOUR_BITS=weight.is_four_bits,
        EXPONENTS=weight.scales.dtype == torch.uint8,
        WHOLE=steps * tiles.split * tiles.k == weight.inputs,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **pdl_options(x.device),
    )
    if tiles.split == 1:
        return parts[0]
    total = parts.sum(dim=0)
    return (total if bias is None else total + bias.float()).to(dtype)


def tile_inputs(group: int, inputs: int) -> int:
    """Inputs of a tile: a power of two that holds whole groups, or lies in one; 0 if there is none."""
    if group >= inputs:
        return MAX_TILE_K
    largest = group & -group  # the largest power of two that divides the group
    if group == largest:
        return MAX_TILE_K if group <= MAX_TILE_K else min(largest, MAX_TILE_K)
    return min(largest, MAX_TILE_K) if largest >= 16 else 0


def choose_tiles(rows: int, outputs: int, inputs: int, tile_k: int, programs: int) -> GroupedTiles:
    """By the number of rows; few rows split their sums so that there are about `programs` programs."""
    if rows <= 16:
        m, n, warps = 16, 64, 4
    elif rows <= 64:
        m, n, warps = 32, 64, 4
    else:
        m, n, warps = 64, 128, 8
    return GroupedTiles(m, n, tile_k, _split(rows, m, n, outputs, inputs, tile_k, programs), warps, 3)


def fixed_tiles(outputs: int, inputs: int, tile_k: int, programs: int) -> GroupedTiles:
    """The same for any number of rows."""
    return GroupedTiles(32, 64, tile_k, _split(1, 32, 64, outputs, inputs, tile_k, programs), 4, 3)


def _split(rows: int, m: int, n: int, outputs: int, inputs: int, tile_k: int, programs: int) -> int:
    made = triton.cdiv(max(1, rows), m) * triton.cdiv(outputs, n)
    longest = max(1, inputs // (4 * tile_k))
    return int(max(1, min(8, programs // made, longest)))
