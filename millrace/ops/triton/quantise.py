"""Quantises activations to FP8, one scale per row. The products that take them are in `gemm`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace.ops.base.quantised import FP8, FP8_MAX, Quantised
from millrace.ops.triton.dependent_launch import pdl_options, wait_for_previous_kernel

WHOLE_ROW = 16384
"""Rows up to this long stay in registers between finding their scale and using it."""


@triton.jit
def _quantise_kernel(
    x_ptr, values_ptr, scales_ptr, K, x_stride, MAX: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel(EARLY)
    row = tl.program_id(0).to(tl.int64)
    ids = tl.arange(0, BLOCK)
    if WHOLE:
        x = tl.load(x_ptr + row * x_stride + ids, mask=ids < K, other=0.0).to(tl.float32)
        largest = tl.max(tl.abs(x), axis=0)
    else:
        highest = tl.zeros([BLOCK], tl.float32)
        for start in range(0, K, BLOCK):
            inside = start + ids < K
            part = tl.load(x_ptr + row * x_stride + start + ids, mask=inside, other=0.0).to(tl.float32)
            highest = tl.maximum(highest, tl.abs(part))
        largest = tl.max(highest, axis=0)
    scale = tl.where(largest > 0, tl.div_rn(largest, MAX), 1.0)
    tl.store(scales_ptr + row, scale)
    # A division would take longer than all the rest. With the reciprocal, a quotient halfway between two FP8 numbers
    # may round either way.
    inverse = tl.minimum(1.0 / scale, 3.0e38)
    if WHOLE:
        value = tl.minimum(tl.maximum(x * inverse, -MAX), MAX)
        tl.store(values_ptr + row * K + ids, value.to(tl.float8e4nv), mask=ids < K)
    else:
        for start in range(0, K, BLOCK):
            inside = start + ids < K
            part = tl.load(x_ptr + row * x_stride + start + ids, mask=inside, other=0.0).to(tl.float32)
            value = tl.minimum(tl.maximum(part * inverse, -MAX), MAX)
            tl.store(values_ptr + row * K + start + ids, value.to(tl.float8e4nv), mask=inside)


def quantise_rows(x: Tensor, whole_row: int = WHOLE_ROW) -> Quantised:
    """As the reference of the same name, in one kernel."""
    if x.stride(1) != 1:
        x = x.contiguous()
    rows, inputs = x.shape
    values = torch.empty((rows, inputs), dtype=FP8, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows == 0:
        return Quantised(values, scales)
    block = min(triton.next_power_of_2(inputs), whole_row)
    _quantise_kernel[(rows,)](
        x,
        values,
        scales,
        inputs,
        x.stride(0),
        MAX=FP8_MAX,
        BLOCK=block,
        WHOLE=block >= inputs,
        num_warps=max(1, min(32, block // 512)),
        **pdl_options(x.device),
    )
    return Quantised(values, scales)
