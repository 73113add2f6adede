"""y[t, h] = W[h] x[t, h] for few rows: each program reads its part of a head's matrix before it waits for x."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace.ops.triton.dependent_launch import pdl_options, wait_for_previous_kernel

MAX_ROWS = 4
TILE = 8192
"""Items of the weight in a program's registers."""


@triton.jit
def _per_head_kernel(
    x_ptr, w_ptr, out_ptr, N, K, x_stride, x_head,
    TILE_K: tl.constexpr, TILE_N: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (head, outputs, row)."""
    head, row = tl.program_id(0), tl.program_id(2)
    k = tl.arange(0, TILE_K)
    n = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    inside = (k < K)[:, None] & (n < N)[None, :]
    w = tl.load(w_ptr + head.to(tl.int64) * N * K + k[:, None] * N + n[None, :], mask=inside, other=0.0)
    wait_for_previous_kernel(EARLY)
    x = tl.load(x_ptr + row * x_stride + head * x_head + k, mask=k < K, other=0.0)
    y = tl.sum(w.to(tl.float32) * x.to(tl.float32)[:, None], axis=0)
    tl.store(out_ptr + (row * tl.num_programs(0) + head) * N + n, y.to(out_ptr.dtype.element_ty), mask=n < N)


def per_head(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, H, K], weight [H, K, N]: [T, H, N]. The whole of a head's inputs must fit a program: K is at most TILE."""
    (rows, heads, inputs), outputs = x.shape, weight.shape[2]
    assert inputs <= TILE
    assert x.stride(2) == 1
    assert weight.is_contiguous()
    out = torch.empty((rows, heads, outputs), dtype=x.dtype, device=x.device)
    tile_k = triton.next_power_of_2(inputs)
    tile_n = min(TILE // tile_k, triton.next_power_of_2(outputs))
    _per_head_kernel[(heads, triton.cdiv(outputs, tile_n), rows)](
        *(x, weight, out, outputs, inputs, x.stride(0), x.stride(1)),
        TILE_K=tile_k,
        TILE_N=tile_n,
        **pdl_options(x.device),
    )
    return out
