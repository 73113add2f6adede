"""The gated activation act(gate) · up of gate_up [T, 2 I] in one pass; quantised per row if the consumer takes FP8."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace.ops.triton.dependent_launch import pdl_options, wait_for_previous_kernel

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}


@triton.jit
def activate(x, KIND: tl.constexpr):
    """x in float32."""
    if KIND == 0:
        return x / (1.0 + tl.exp(-x))
    if KIND == 1:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        e = tl.exp(-2.0 * tl.abs(inner))
        t = (1.0 - e) / (1.0 + e)
        return 0.5 * x * (1.0 + tl.where(inner < 0, -t, t))
    return 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))


@triton.jit
def _gated_kernel(gate_up_ptr, out_ptr, inner, BLOCK: tl.constexpr, KIND: tl.constexpr, EARLY: tl.constexpr):
    wait_for_previous_kernel(EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < inner
    gate = tl.load(gate_up_ptr + row * 2 * inner + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * inner + inner + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * inner + at, (activate(gate, KIND) * up).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gated_fp8_kernel(
    gate_up_ptr, out_ptr, scale_ptr, inner, BLOCK: tl.constexpr, KIND: tl.constexpr, EARLY: tl.constexpr
):
    """One program per row: the scale depends on its largest item."""
    wait_for_previous_kernel(EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < inner
    gate = tl.load(gate_up_ptr + row * 2 * inner + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * inner + inner + at, mask=inside, other=0.0)
    product = (activate(gate, KIND) * up.to(tl.float32)).to(up.dtype).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(tl.where(inside, product, 0.0)), 0), 1e-12)
    tl.store(scale_ptr + row, largest / 448.0)
    scaled = tl.minimum(tl.maximum(product * (448.0 / largest), -448.0), 448.0)
    tl.store(out_ptr + row * inner + at, scaled.to(out_ptr.dtype.element_ty), mask=inside)


def gated(
    gate_up: Tensor, kind: str, quantise: bool = False, shape: tuple[int, int] = (1024, 0)
) -> tuple[Tensor, Tensor | None]:
    """([T, I], its scales [T] if quantised). `shape`: items per program, unless it takes whole rows, and warps; 0 = a
    default."""
    gate_up = gate_up.contiguous()
    rows, width = gate_up.shape
    inner = width // 2
    number = ACTIVATIONS[kind]
    if not quantise:
        out = torch.empty((rows, inner), dtype=gate_up.dtype, device=gate_up.device)
        block = min(shape[0], triton.next_power_of_2(inner))
        grid = (rows, triton.cdiv(inner, block))
        _gated_kernel[grid](
            gate_up, out, inner, BLOCK=block, KIND=number, num_warps=shape[1] or 4, **pdl_options(gate_up.device)
        )
        return out, None
    out = torch.empty((rows, inner), dtype=torch.float8_e4m3fn, device=gate_up.device)
    scales = torch.empty(rows, dtype=torch.float32, device=gate_up.device)
    block = triton.next_power_of_2(inner)
    warps = shape[1] or max(1, min(16, block // 512))
    _gated_fp8_kernel[(rows,)](
        gate_up, out, scales, inner, BLOCK=block, KIND=number, num_warps=warps, **pdl_options(out.device)
    )
    return out, scales
