"""y = x W^T for many rows and an INT8 weight with a scale per output; rows of x are rounded to INT8."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace.ops.triton.dependent_launch import pdl_options, wait_for_previous_kernel

INT8_MAX = 127.0
_BLOCK = 4096


@dataclass(frozen=True, slots=True)
class Int8Tiles:
    """`m` rows by `n` outputs by `k` inputs; `together`: tiles of rows that follow each other, so that weights stay in
    the L2 cache."""

    m: int
    n: int
    k: int = 128
    warps: int = 8
    stages: int = 3
    together: int = 8


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
    x_ptr, w_ptr, x_scales_ptr, w_scales_ptr, bias_ptr, out_ptr, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TOGETHER: tl.constexpr, WHOLE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel(EARLY)
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    pid = tl.program_id(0)
    first = pid // (TOGETHER * tiles_n) * TOGETHER
    size = tl.minimum(tiles_m - first, TOGETHER)
    within = pid % (TOGETHER * tiles_n)
    rows = (first + within % size) * BM + tl.arange(0, BM)
    outputs = within // size * BN + tl.arange(0, BN)
    # Past the end: any row, whose products are not stored.
    x_rows = x_ptr + tl.minimum(rows, M - 1).to(tl.int64)[:, None] * K
    w_rows = w_ptr + tl.minimum(outputs, N - 1).to(tl.int64)[:, None] * K
    acc = tl.zeros([BM, BN], tl.int32)
    for start in range(0, K, BK):
        inputs = start + tl.arange(0, BK)
        if WHOLE:
            x = tl.load(x_rows + inputs[None, :])
            w = tl.load(w_rows + inputs[None, :])
        else:
            x = tl.load(x_rows + inputs[None, :], mask=(inputs < K)[None, :], other=0)
            w = tl.load(w_rows + inputs[None, :], mask=(inputs < K)[None, :], other=0)
        acc = tl.dot(x, tl.trans(w), acc, out_dtype=tl.int32)
    x_scales = tl.load(x_scales_ptr + rows, mask=rows < M, other=0.0)
    w_scales = tl.load(w_scales_ptr + outputs, mask=outputs < N, other=0.0).to(tl.float32)
    total = acc.to(tl.float32) * x_scales[:, None] * w_scales[None, :]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + outputs, mask=outputs < N, other=0.0).to(tl.float32)[None, :]
    places = out_ptr + rows.to(tl.int64)[:, None] * N + outputs[None, :]
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
    (rows, inputs), outputs = x.shape, codes.shape[0]
    out = torch.empty((rows, outputs), dtype=out_dtype or x.dtype, device=x.device)
    if rows == 0:
        return out
    values, x_scales = round_rows(x)
    _int8_kernel[(triton.cdiv(rows, tiles.m) * triton.cdiv(outputs, tiles.n),)](
        values, codes, x_scales, scales, bias, out, rows, outputs, inputs,
        BM=tiles.m, BN=tiles.n, BK=tiles.k, TOGETHER=tiles.together, WHOLE=inputs % tiles.k == 0,
        num_warps=tiles.warps, num_stages=tiles.stages, **pdl_options(x.device),
    )  # fmt: skip
    return out


def choose_tiles(rows: int, is_large: bool = True) -> Int8Tiles:
    """`is_large`: for the shared memory of Hopper."""
    if not is_large:
        return Int8Tiles(64 if rows <= 128 else 128, 128, k=64)
    if rows <= 128:
        return Int8Tiles(64, 128, warps=4, stages=4)
    return Int8Tiles(128, 128, stages=4) if rows <= 512 else Int8Tiles(128, 256)
