"""y = x W^T for an FP8 weight with a scale per block of outputs and 128 inputs; x is rounded to FP8, with a scale for
each row and 128 inputs.

Products of 128 inputs are summed by the matrix unit and added up in float32. With few rows the weight's outputs are the
rows of a matrix instruction, which takes 64 of them but as few as 16 columns, and programs share the inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace.ops.base.quantised import FP8, FP8_MAX
from millrace.ops.triton.dependent_launch import pdl_options, wait_for_previous_kernel
from millrace.ops.triton.gemm.tile_order import operand_rows, operand_tile, tile_places
from millrace.ops.triton.kernel_keys import settle_keys

GROUP = 128
"""Inputs of a scale."""
_GROUPS_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class Fp8Tiles:
    """`m` rows by `n` outputs; `split`: parts of a sum; `together`: tiles of rows that follow each other, so that
    weights stay in the L2 cache."""

    m: int
    n: int
    split: int = 1
    warps: int = 4
    stages: int = 4
    together: int = 8

    @property
    def is_few(self) -> bool:
        return self.m < 64


@triton.jit
def _round_kernel(
    x_ptr, values_ptr, scales_ptr, K, x_stride, groups, row_stride, group_stride,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, MOST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel(EARLY)
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    part = tl.load(x_ptr + row * x_stride + at, mask=at < K, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(part), axis=1)
    scales = tl.where(largest > 0, largest / MOST, 1.0)
    tl.store(scales_ptr + row * row_stride + group * group_stride, scales, mask=group < groups)
    rounded = tl.minimum(tl.maximum(part / scales[:, None], -MOST), MOST)
    tl.store(values_ptr + row * K + at, rounded.to(values_ptr.dtype.element_ty), mask=at < K)


def round_groups(x: Tensor, *, rows_side_by_side: bool = False) -> tuple[Tensor, Tensor]:
    """FP8 [M, K], and the scales [M, K / 128]: the largest magnitude of each group / the largest number of FP8.
    `rows_side_by_side`: the scales of one group lie next to each other, as torch._scaled_mm reads them."""
    rows, inputs = x.shape
    groups = triton.cdiv(inputs, GROUP)
    x = x if x.stride(1) == 1 else x.contiguous()
    values = torch.empty((rows, inputs), dtype=FP8, device=x.device)
    shape = (groups, rows) if rows_side_by_side else (rows, groups)
    scales = torch.empty(shape, dtype=torch.float32, device=x.device)
    if rows_side_by_side:
        scales = scales.t()
    if rows:
        at_once = min(triton.next_power_of_2(groups), _GROUPS_AT_ONCE)
        _round_kernel[(rows, triton.cdiv(groups, at_once))](
            *(x, values, scales, inputs, x.stride(0), groups, scales.stride(0), scales.stride(1)),
            GROUP=GROUP,
            GROUPS=at_once,
            MOST=FP8_MAX,
            **pdl_options(x.device),
        )
    return values, scales


@triton.jit
def _product_kernel(
    x_ptr, w_ptr, x_scales_ptr, w_scales_ptr, bias_ptr, out_ptr, M, N, K, groups, w_scales_stride, steps,
    ROWS_PER_SCALE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TOGETHER: tl.constexpr,
    FEW: tl.constexpr, WHOLE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel(EARLY)
    rows, outputs = tile_places(M, N, BM, BN, TOGETHER)
    x_rows, w_rows = operand_rows(x_ptr, rows, M, K), operand_rows(w_ptr, outputs, N, K)
    x_scales = x_scales_ptr + tl.minimum(rows, M - 1) * groups
    w_scales = w_scales_ptr + tl.minimum(outputs, N - 1) // ROWS_PER_SCALE * w_scales_stride
    acc = tl.zeros([BN, BM] if FEW else [BM, BN], tl.float32)
    begin = tl.program_id(1) * steps
    for step in range(begin, tl.minimum(begin + steps, groups)):
        inputs = step * BK + tl.arange(0, BK)
        x, w = operand_tile(x_rows, inputs, K, WHOLE), operand_tile(w_rows, inputs, K, WHOLE)
        x_scale = tl.load(x_scales + step)
        w_scale = tl.load(w_scales + step).to(tl.float32)
        if FEW:
            acc += tl.dot(w, tl.trans(x)) * (w_scale[:, None] * x_scale[None, :])
        else:
            acc += tl.dot(x, tl.trans(w)) * (x_scale[:, None] * w_scale[None, :])
    total = tl.trans(acc) if FEW else acc
    if bias_ptr is not None:
        total += tl.load(bias_ptr + outputs, mask=outputs < N, other=0.0).to(tl.float32)[None, :]
    places = out_ptr + (tl.program_id(1) * M + rows).to(tl.int64)[:, None] * N + outputs[None, :]
    tl.store(places, total.to(out_ptr.dtype.element_ty), mask=(rows < M)[:, None] & (outputs < N)[None, :])


settle_keys(globals())


def multiply(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    rows_per_scale: int,
    tiles: Fp8Tiles,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """x [M, K], codes FP8 [N, K], scales [N / rows_per_scale, K / 128]: [M, N] in `out_dtype`, by default that of x."""
    (rows, inputs), outputs, dtype = x.shape, codes.shape[0], out_dtype or x.dtype
    is_split = tiles.split > 1
    parts = torch.empty((tiles.split, rows, outputs), dtype=torch.float32 if is_split else dtype, device=x.device)
    if rows == 0:
        return parts[0].to(dtype)
    values, x_scales = round_groups(x)
    groups = x_scales.shape[1]
    _product_kernel[(triton.cdiv(rows, tiles.m) * triton.cdiv(outputs, tiles.n), tiles.split)](
        *(values, codes, x_scales, scales, None if is_split else bias, parts, rows, outputs, inputs),
        *(groups, scales.stride(0), triton.cdiv(groups, tiles.split)),
        ROWS_PER_SCALE=rows_per_scale,
        BM=tiles.m,
        BN=tiles.n,
        BK=GROUP,
        TOGETHER=tiles.together,
        FEW=tiles.is_few,
        WHOLE=inputs % GROUP == 0,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **pdl_options(x.device),
    )
    if not is_split:
        return parts[0]
    total = parts.sum(dim=0)
    return (total if bias is None else total + bias.float()).to(dtype)


def choose_tiles(rows: int, outputs: int, inputs: int, programs: int, is_large: bool = True) -> Fp8Tiles:
    """`is_large`: for the shared memory of Hopper. Few rows split their sums so that there are about `programs`."""
    stages = 4 if is_large else 2
    if rows <= 32:
        made, longest = triton.cdiv(outputs, 128), max(1, triton.cdiv(inputs, GROUP) // 4)
        split = int(max(1, min(8, programs // made, longest)))
        return Fp8Tiles(16 if rows <= 16 else 32, 128, split, 4, stages)
    if rows <= 64 and outputs <= 8192:
        if inputs >= 64 * GROUP:
            return Fp8Tiles(64, 128, 4, 4, stages)
        return Fp8Tiles(64, 64, 1, 4, 2 * stages)
    return Fp8Tiles(64, 128, 1, 4, stages)
