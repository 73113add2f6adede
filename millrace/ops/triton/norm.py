"""RMS norm of rows, alone or after adding the residual, optionally quantised to FP8 with a scale per row.

A program holds one or two rows in registers: each input is read once and each output written once. How a row is spread
over threads depends on its length alone, so its sum does not depend on the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace.ops.base.unsummed import Unsummed
from millrace.ops.triton.dependent_launch import pdl_options, wait_for_previous_kernel

MANY_ROWS = 1024
"""With more rows than this, a program takes two and loads the weights once for both."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Rows per program, and warps."""

    rows: int
    warps: int


@triton.jit
def _add_choices(
    outputs_ptr, shares_ptr, source, at, inside, dim,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    """[ROWS, BLOCK]: the expert outputs of tokens `source` of an Unsummed, weighted and added, in the model's dtype."""
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for choice in tl.static_range(CHOICES):
        slot = source * CHOICES + choice
        part = tl.load(outputs_ptr + slot * dim + at, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(shares_ptr + slot) * part
    return total.to(outputs_ptr.dtype.element_ty)


@triton.jit
def _zero(counters_ptr, COUNTERS: tl.constexpr, COUNTER_BLOCK: tl.constexpr):
    """Program 0 sets all counters to zero; the others write nothing."""
    places = tl.arange(0, COUNTER_BLOCK)
    tl.store(counters_ptr + places, places * 0, mask=places < tl.where(tl.program_id(0) == 0, COUNTERS, 0))


@triton.jit(do_not_specialize=["rows"])
def _norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, total_ptr, scale_ptr, shares_ptr, counters_ptr, index_ptr,
    rows, dim, x_stride, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, QUANTISE: tl.constexpr, CHOICES: tl.constexpr,
    COUNTERS: tl.constexpr, COUNTER_BLOCK: tl.constexpr, PICK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """CHOICES: 0, or the number of expert outputs per token in x, which are weighted and added first.
    PICK: result row i is that of input row index[i], and the sum with the residual is not stored."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    weight = tl.load(weight_ptr + at, mask=at < dim, other=0.0)
    inside = (at < dim) & (row < rows)
    # The input row; a scalar for one row, so that values per row are not loaded once per item.
    source = tl.minimum(tl.program_id(0).to(tl.int64) if ROWS == 1 else row, rows - 1)
    if PICK:
        source = tl.load(index_ptr + source).to(tl.int64)
    wait_for_previous_kernel(EARLY)
    if CHOICES > 0:
        _zero(counters_ptr, COUNTERS, COUNTER_BLOCK)
        x = _add_choices(x_ptr, shares_ptr, source, at, inside, dim, ROWS, BLOCK, CHOICES)
    else:
        x = tl.load(x_ptr + source * x_stride + at, mask=inside, other=0.0)
    if ADD:
        # The sum is rounded to the model's dtype before the norm, as when it is stored.
        x = (x.to(tl.float32) + tl.load(residual_ptr + source * dim + at, mask=inside, other=0.0).to(tl.float32)).to(
            x.dtype
        )
        if not PICK:
            tl.store(total_ptr + row * dim + at, x, mask=inside)
    wide = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 1, keep_dims=True) / dim + eps)
    normed = wide * scale * weight
    if QUANTISE:
        # Rounded to the model's dtype first, so that the result is the same as quantising afterwards.
        normed = normed.to(x_ptr.dtype.element_ty).to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(normed), 1, keep_dims=True), 1e-12)
        tl.store(scale_ptr + row, largest / 448.0, mask=row < rows)
        normed = tl.minimum(tl.maximum(normed * (448.0 / largest), -448.0), 448.0)
    tl.store(out_ptr + row * dim + at, normed.to(out_ptr.dtype.element_ty), mask=inside)


def _launch(
    x: Tensor | Unsummed,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    quantise: bool = False,
    shape: Shape | None = None,
    index: Tensor | None = None,
    out: Tensor | None = None,
) -> list[Tensor | None]:
    """[normed, scales or None, x + residual or None]; with `index` the normed rows go to `out`."""
    values, shares, counters, choices = _parts(x)
    sizes, rows, dim = x.shape, values.numel() // values.shape[-1] // max(1, choices), values.shape[-1]
    if index is not None:
        sizes, rows = (index.numel(), dim), index.numel()
    if out is None:
        out = torch.empty(sizes, dtype=torch.float8_e4m3fn if quantise else values.dtype, device=values.device)
    keeps = residual is not None and index is None
    total = torch.empty(sizes, dtype=values.dtype, device=values.device) if keeps else None
    scales = torch.empty(rows, dtype=torch.float32, device=values.device) if quantise else None
    num_counters = 0 if counters is None else counters.numel()
    block = triton.next_power_of_2(dim)
    shape = shape or shape_for(block, 1 if choices else rows)
    _norm_kernel[(triton.cdiv(rows, shape.rows),)](
        values, residual, weight, out, total, scales, shares, counters, index,
        rows, dim, values.stride(-2) if values.dim() > 1 else dim, eps,
        ROWS=shape.rows, BLOCK=block, ADD=residual is not None, QUANTISE=quantise, CHOICES=choices,
        COUNTERS=num_counters, COUNTER_BLOCK=triton.next_power_of_2(max(1, num_counters)), PICK=index is not None,
        num_warps=shape.warps, **pdl_options(values.device),
    )  # fmt: skip
    return [out, scales, total]


def _parts(x: Tensor | Unsummed) -> tuple[Tensor, Tensor | None, Tensor | None, int]:
    """(values, shares, counters, choices)"""
    if isinstance(x, Unsummed):
        return x.outputs, x.weights, x.counters, x.weights.shape[1]
    return (x if x.dim() == 2 and x.stride(1) == 1 else x.contiguous()), None, None, 0


def shape_for(block: int, rows: int) -> Shape:
    """About eight items of a row per thread, for low latency."""
    warps = max(1, min(16, block // 256))
    return Shape(1 if rows <= MANY_ROWS else 2, warps)


def rms_norm(
    x: Tensor | Unsummed, weight: Tensor, eps: float, quantise: bool = False, shape: Shape | None = None
) -> tuple[Tensor, Tensor | None]:
    """(normed, its scales if quantised)"""
    out, scales, _ = _launch(x, None, weight, eps, quantise, shape)
    assert out is not None
    return out, scales


def add_rms_norm(
    x: Tensor | Unsummed,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    quantise: bool = False,
    shape: Shape | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(normed, its scales if quantised, x + residual)"""
    out, scales, total = _launch(x, residual, weight, eps, quantise, shape)
    assert out is not None
    assert total is not None
    return out, scales, total


def add_rms_norm_of(
    x: Tensor | Unsummed, residual: Tensor, weight: Tensor, eps: float, index: Tensor, out: Tensor
) -> Tensor:
    """The norm of rows `index` of x + residual, into `out`."""
    _launch(x, residual, weight, eps, index=index, out=out)
    return out
