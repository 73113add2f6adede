"""RMS norm of rows, alone or after adding the residual, and rounded to FP8 with a scale per row where that is wanted.

A program holds one row, or a few, in registers: each input is read once and each output written once. How a row is
spread over threads depends on its length alone, so that its sum does not depend on how many rows there are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace.ops.triton import early_start
from millrace.ops.triton.early import wait_for_last

MANY_ROWS = 1024
"""With more a program takes two and fetches the weights once for them."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a program takes."""

    rows: int
    warps: int


@triton.jit(do_not_specialize=["rows"])
def _norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, total_ptr, scale_ptr, rows, dim, x_stride, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, QUANTISE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    weight = tl.load(weight_ptr + at, mask=at < dim, other=0.0)
    inside = (at < dim) & (row < rows)
    wait_for_last(EARLY)
    x = tl.load(x_ptr + row * x_stride + at, mask=inside, other=0.0)
    if ADD:
        # The sum is rounded to the model's dtype before it is normed, as it is when it is stored.
        x = (x.to(tl.float32) + tl.load(residual_ptr + row * dim + at, mask=inside, other=0.0).to(tl.float32)).to(
            x.dtype
        )
        tl.store(total_ptr + row * dim + at, x, mask=inside)
    wide = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 1, keep_dims=True) / dim + eps)
    normed = wide * scale * weight
    if QUANTISE:
        # Rounded to the model's dtype first: the norm's meaning does not change when its consumer takes FP8.
        normed = normed.to(x_ptr.dtype.element_ty).to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(normed), 1, keep_dims=True), 1e-12)
        tl.store(scale_ptr + row, largest / 448.0, mask=row < rows)
        normed = tl.minimum(tl.maximum(normed * (448.0 / largest), -448.0), 448.0)
    tl.store(out_ptr + row * dim + at, normed.to(out_ptr.dtype.element_ty), mask=inside)


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, quantise: bool, shape: Shape | None
) -> list[Tensor | None]:
    """[normed, scales or None, x + residual or None]"""
    if x.dim() != 2 or x.stride(1) != 1:
        x = x.contiguous()
    dim = x.shape[-1]
    rows = x.numel() // dim
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn if quantise else x.dtype, device=x.device)
    total = None if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device) if quantise else None
    block = triton.next_power_of_2(dim)
    shape = shape or shape_for(block, rows)
    _norm_kernel[(triton.cdiv(rows, shape.rows),)](
        x, residual, weight, out, total, scales, rows, dim, x.stride(-2) if x.dim() > 1 else dim, eps,
        ROWS=shape.rows, BLOCK=block, ADD=residual is not None, QUANTISE=quantise, num_warps=shape.warps,
        **early_start(x.device),
    )  # fmt: skip
    return [out, scales, total]


def shape_for(block: int, rows: int) -> Shape:
    """About eight items of a row in a thread, so that a row takes little time."""
    warps = max(1, min(16, block // 256))
    return Shape(1 if rows <= MANY_ROWS else 2, warps)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, quantise: bool = False, shape: Shape | None = None
) -> tuple[Tensor, Tensor | None]:
    """(normed, its scales if quantised)"""
    out, scales, _ = _launch(x, None, weight, eps, quantise, shape)
    assert out is not None
    return out, scales


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, quantise: bool = False, shape: Shape | None = None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(normed, its scales if quantised, x + residual)"""
    out, scales, total = _launch(x, residual, weight, eps, quantise, shape)
    assert out is not None
    assert total is not None
    return out, scales, total
