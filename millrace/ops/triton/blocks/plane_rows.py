"""Rows of a weight in planes of codes (`planes.py`) without levels, dequantised as they are looked up."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace.ops.triton.blocks.planes import PlanesWeight
from millrace.ops.triton.kernel_keys import settle_keys

_BLOCK_K = 1024


@triton.jit
def _half(bits):
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _rows_kernel(
    ids_ptr, lower_ptr, upper_ptr, scales_ptr, factors_ptr, out_ptr, K, per_tile,
    SCALES: tl.constexpr, UPPER: tl.constexpr, OFFSET: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = k < K
    n = tl.load(ids_ptr + row)
    tile, g, r = n // 16, n % 8, n % 16 // 8
    a, t, e = k % 64 // 32, k % 32 // 8, k % 2
    place = tile * (K * 2) + k // 64 * 128 + g * 16 + t * 4 + 2 * a + k % 8 // 4
    i = k % 4 // 2 * 2 + r
    codes = (tl.load(lower_ptr + place, mask=inside, other=0) >> (16 * e + 4 * i)) & 15
    if UPPER:
        upper = tl.load(upper_ptr + place, mask=inside, other=0).to(tl.int32)
        codes |= ((upper >> (UPPER * (4 * e + i))) & ((1 << UPPER) - 1)) << 4
    pair = 2 * g + r
    scales_ptr += tile * per_tile
    least = tl.zeros([BLOCK_K], tl.float32)
    if SCALES <= 1:
        found = tl.load(scales_ptr + k // 32 * 16 + pair, mask=inside, other=0)
        scale = _half(found)  # its lower 16 bits
        if SCALES == 1:
            least = _half(found >> 16) + scale * OFFSET
    elif SCALES == 2:
        words = scales_ptr + k // 256 * 64 + pair
        block = k % 256 // 64
        fields = tl.load(words + 16 + 16 * tl.minimum(block, 2), mask=inside, other=0)
        last = (tl.load(words + 16, mask=inside, other=0) >> 24) & 255
        last |= ((tl.load(words + 32, mask=inside, other=0) >> 24) & 255) << 8
        last |= ((tl.load(words + 48, mask=inside, other=0) >> 24) & 255) << 16
        fields = (tl.where(block < 3, fields, last) >> (12 * a)) & 0xFFF
        head = tl.load(words, mask=inside, other=0)
        scale = _half(head & 0xFFFF) * (fields & 63).to(tl.float32)
        least = scale * OFFSET - _half(head >> 16) * (fields >> 6).to(tl.float32)
    else:
        factors = tl.load(scales_ptr + k // 64 * 64 + t // 2 * 32 + g * 4 + 2 * a + r, mask=inside, other=0)
        whole = _half(tl.load(factors_ptr + tile * (K // 16) + k // 256 * 16 + pair, mask=inside, other=0))
        scale = whole * (factors.to(tl.float32) - 128.0)
    values = scale * (codes - OFFSET).to(tl.float32) + least
    tl.store(out_ptr + row * K + k, values.to(out_ptr.dtype.element_ty), mask=inside)


def rows_of_planes(weight: PlanesWeight, ids: Tensor) -> Tensor:
    """int64 [T] -> [T, K] in the weight's dtype. Nothing waits for the device."""
    made = weight.kind
    assert made.levels is None
    out = torch.empty((ids.shape[0], weight.inputs), dtype=weight.dtype, device=weight.lower.device)
    if ids.shape[0]:
        _rows_kernel[(ids.shape[0], triton.cdiv(weight.inputs, _BLOCK_K))](
            ids.contiguous(), *weight.operands, out, weight.inputs, weight.scales[0].numel(),
            SCALES=made.scales, UPPER=made.upper, OFFSET=made.offset, BLOCK_K=_BLOCK_K,
        )  # fmt: skip
    return out


settle_keys(globals())
