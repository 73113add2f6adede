"""RMS norm of rows, alone or after adding the residual, and rounded to FP8 with a scale per row where that is wanted.

One program per row, which it holds in registers: each input is read once and each output written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace.ops.triton import early_start

MANY_ROWS = 1024


@triton.jit
def _norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, total_ptr, scale_ptr, dim, x_stride, eps,
    BLOCK: tl.constexpr, ADD: tl.constexpr, QUANTISE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < dim
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(x_ptr + row * x_stride + at, mask=inside, other=0.0)
    if ADD:
        # The sum is rounded to the model's dtype before it is normed, as it is when it is stored.
        x = (x.to(tl.float32) + tl.load(residual_ptr + row * dim + at, mask=inside, other=0.0).to(tl.float32)).to(
            x.dtype
        )
        tl.store(total_ptr + row * dim + at, x, mask=inside)
    wide = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / dim + eps)
    normed = wide * scale * weight
    if QUANTISE:
        # Rounded to the model's dtype first: the norm's meaning does not change when its consumer takes FP8.
        normed = normed.to(x_ptr.dtype.element_ty).to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(normed), 0), 1e-12)
        tl.store(scale_ptr + row, largest / 448.0)
        normed = tl.minimum(tl.maximum(normed * (448.0 / largest), -448.0), 448.0)
    tl.store(out_ptr + row * dim + at, normed.to(out_ptr.dtype.element_ty), mask=inside)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, quantise: bool) -> list[Tensor | None]:
    """[normed, scales or None, x + residual or None]"""
    if x.dim() != 2 or x.stride(1) != 1:
        x = x.contiguous()
    dim = x.shape[-1]
    rows = x.numel() // dim
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn if quantise else x.dtype, device=x.device)
    total = None if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device) if quantise else None
    block = triton.next_power_of_2(dim)
    _norm_kernel[(rows,)](
        x, residual, weight, out, total, scales, dim, x.stride(-2) if x.dim() > 1 else dim, eps,
        BLOCK=block, ADD=residual is not None, QUANTISE=quantise, num_warps=warps_for(block, rows),
        **early_start(x.device),
    )  # fmt: skip
    return [out, scales, total]


def warps_for(block: int, rows: int) -> int:
    """Few rows: about eight items a thread, so that a row takes little time. Many: wider threads, more rows at once."""
    return max(1, min(16, block // 256) if rows <= MANY_ROWS else min(8, block // 1024))


def rms_norm(x: Tensor, weight: Tensor, eps: float, quantise: bool = False) -> tuple[Tensor, Tensor | None]:
    """(normed, its scales if quantised)"""
    out, scales, _ = _launch(x, None, weight, eps, quantise)
    assert out is not None
    return out, scales


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, quantise: bool = False
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(normed, its scales if quantised, x + residual)"""
    out, scales, total = _launch(x, residual, weight, eps, quantise)
    assert out is not None
    assert total is not None
    return out, scales, total
