"""y = x W^T for an FP8 weight with a scale per block of outputs and 128 inputs; x is rounded to FP8, with a scale for
each row and 128 inputs.

Products of 128 inputs are summed by the matrix unit and added up in float32. With few rows the weight's outputs are the
rows of a matrix instruction, which takes 64 of them but as few as 16 columns, and programs share the inputs: the last
one to arrive adds their sums in a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace.ops.base.quantised import FP8, FP8_MAX
from millrace.ops.triton.dependent_launch import pdl_options, wait_for_previous_kernel
from millrace.ops.triton.gemm.kernels import prefetch
from millrace.ops.triton.gemm.tile_order import operand_rows, operand_tile, tile_places
from millrace.ops.triton.kernel_keys import settle_keys

GROUP = 128
"""Inputs of a scale."""
_GROUPS_AT_ONCE = 32
_FEW_AT_ONCE, _FEW_ROWS = 8, 128
"""Groups that a program rounds."""


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

    def count(self, rows: int, outputs: int) -> int:
        """Number of output tiles."""
        return -(-rows // self.m) * -(-outputs // self.n)


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
        at_once = min(triton.next_power_of_2(groups), _FEW_AT_ONCE if rows <= _FEW_ROWS else _GROUPS_AT_ONCE)
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
    x_ptr, w_ptr, x_scales_ptr, w_scales_ptr, bias_ptr, out_ptr, partial_ptr, counter_ptr, M, N, K, groups,
    w_scales_stride, steps,
    ROWS_PER_SCALE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TOGETHER: tl.constexpr,
    SPLIT: tl.constexpr, FEW: tl.constexpr, WHOLE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    rows, outputs = tile_places(M, N, BM, BN, TOGETHER)
    begin = tl.program_id(1) * steps
    end = tl.minimum(begin + steps, groups)
    if EARLY and FEW and WHOLE:
        prefetch(w_ptr, tl.minimum(outputs, N - 1), K, begin * BK, tl.minimum(end * BK, K), 2 * BK, 1)
    wait_for_previous_kernel(EARLY)
    x_rows, w_rows = operand_rows(x_ptr, rows, M, K), operand_rows(w_ptr, outputs, N, K)
    x_scales = x_scales_ptr + tl.minimum(rows, M - 1) * groups
    w_scales = w_scales_ptr + tl.minimum(outputs, N - 1) // ROWS_PER_SCALE * w_scales_stride
    acc = tl.zeros([BN, BM] if FEW else [BM, BN], tl.float32)
    for step in range(begin, end):
        inputs = step * BK + tl.arange(0, BK)
        x, w = operand_tile(x_rows, inputs, K, WHOLE), operand_tile(w_rows, inputs, K, WHOLE)
        x_scale = tl.load(x_scales + step)
        w_scale = tl.load(w_scales + step).to(tl.float32)
        if FEW:
            acc += tl.dot(w, tl.trans(x)) * (w_scale[:, None] * x_scale[None, :])
        else:
            acc += tl.dot(x, tl.trans(w)) * (x_scale[:, None] * w_scale[None, :])
    is_last = True
    if SPLIT > 1:
        # Parts are whole tiles, one after the other, including what lies past the edge of the output.
        SIDE: tl.constexpr = BM if FEW else BN
        spots = tl.arange(0, BM * BN // SIDE)[:, None] * SIDE + tl.arange(0, SIDE)[None, :]
        parts = partial_ptr + tl.program_id(0).to(tl.int64) * (SPLIT * BM * BN) + spots
        tl.store(parts + tl.program_id(1) * (BM * BN), acc)
        # All warps must have stored before one of them counts, whose release makes the stores visible.
        tl.debug_barrier()
        counter = counter_ptr + tl.program_id(0)
        is_last = tl.atomic_add(counter, 1, sem="acq_rel") == SPLIT - 1
        if is_last:
            tl.store(counter, 0)
            acc = tl.zeros_like(acc)
            for part in range(SPLIT):
                acc += tl.load(parts + part * (BM * BN), cache_modifier=".cg")
    if is_last:
        total = tl.trans(acc) if FEW else acc
        if bias_ptr is not None:
            total += tl.load(bias_ptr + outputs, mask=outputs < N, other=0.0).to(tl.float32)[None, :]
        places = out_ptr + rows.to(tl.int64)[:, None] * N + outputs[None, :]
        tl.store(places, total.to(out_ptr.dtype.element_ty), mask=(rows < M)[:, None] & (outputs < N)[None, :])


settle_keys(globals())


def multiply(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    rows_per_scale: int,
    tiles: Fp8Tiles,
    counters: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """x [M, K], codes FP8 [N, K], scales [N / rows_per_scale, K / 128]: [M, N] in `out_dtype`, by default that of x.
    `counters`: zeros, at least `tiles.count(M, N)` if sums are split, zero again afterwards."""
    (rows, inputs), outputs = x.shape, codes.shape[0]
    out = torch.empty((rows, outputs), dtype=out_dtype or x.dtype, device=x.device)
    if rows == 0:
        return out
    count, groups = tiles.count(rows, outputs), triton.cdiv(inputs, GROUP)
    partial = out
    if tiles.split > 1:
        partial = torch.empty(count * tiles.split * tiles.m * tiles.n, dtype=torch.float32, device=x.device)
    values, x_scales = round_groups(x)
    _product_kernel[(count, tiles.split)](
        *(values, codes, x_scales, scales, bias, out, partial, counters, rows, outputs, inputs),
        *(groups, scales.stride(0), triton.cdiv(groups, tiles.split)),
        ROWS_PER_SCALE=rows_per_scale,
        BM=tiles.m,
        BN=tiles.n,
        BK=GROUP,
        TOGETHER=tiles.together,
        SPLIT=tiles.split,
        FEW=tiles.is_few,
        WHOLE=inputs % GROUP == 0,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **pdl_options(x.device),
    )
    return out


def choose_tiles(rows: int, outputs: int, inputs: int, programs: int, is_large: bool = True) -> Fp8Tiles:
    """`is_large`: for the shared memory of Hopper. Few rows split their sums so that there are about `programs`."""
    stages, deep = (4, 6) if is_large else (2, 2)
    longest = max(1, triton.cdiv(inputs, GROUP) // 4)
    is_wide, is_deep = outputs > 8192, inputs >= 64 * GROUP
    if rows <= 16 and not is_wide and not is_deep:
        return Fp8Tiles(16, 64, min(4, longest), 4, deep)
    if rows <= 32:
        split = int(max(1, min(8, (programs if rows <= 16 else programs // 2) // triton.cdiv(outputs, 128), longest)))
        return Fp8Tiles(16 if rows <= 16 else 32, 128, split, 4, deep)
    if rows <= 64 and not is_wide:
        split = 4 if is_deep else int(max(1, min(4, programs // triton.cdiv(outputs, 64), longest)))
        return Fp8Tiles(64, 128 if is_deep else 64, split, 4, deep)
    return Fp8Tiles(64, 128, 1, 4, stages)


def most_tiles(outputs: int) -> int:
    """Counters that a product needs with any tiles of `choose_tiles`."""
    return -(-outputs // 64)
