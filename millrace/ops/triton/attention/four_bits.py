"""The four-bit KV cache in kernels (`ops/kv/four_bits.py`): rotation, rounding, and vectors in two halves.

The two numbers of a byte are eight apart in the vector. So attention takes a vector as two halves: the lower halves of
all bytes, then the upper ones. Numbers are read as -8 to 7, which every type holds exactly; with a scale and an offset
per vector, products are those of small integers, corrected once per key.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _halves(x, ROWS: tl.constexpr, DP: tl.constexpr):
    """The halves [ROWS, DP / 2] of vectors [ROWS, DP]."""
    low, high = tl.split(tl.permute(tl.reshape(x, [ROWS, DP // 16, 2, 8]), (0, 1, 3, 2)))
    return tl.reshape(low, [ROWS, DP // 2]), tl.reshape(high, [ROWS, DP // 2])


@triton.jit
def _from_halves(low, high, ROWS: tl.constexpr, DP: tl.constexpr):
    """The inverse."""
    units = tl.permute(tl.reshape(tl.join(low, high), [ROWS, DP // 16, 8, 2]), (0, 1, 3, 2))
    return tl.reshape(units, [ROWS, DP])


@triton.jit
def _rotate(x, ROWS: tl.constexpr, DP: tl.constexpr, SIZE: tl.constexpr):
    """Walsh-Hadamard transforms of SIZE numbers each of float32 [ROWS, DP]. Twice gives x times SIZE."""
    for step in tl.static_range(10):
        if (1 << step) < SIZE:
            pairs = tl.reshape(x, [ROWS, DP // (2 << step), 2, 1 << step])
            first, second = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
            pairs = tl.permute(tl.join(first + second, first - second), (0, 1, 3, 2))
            x = tl.reshape(pairs, [ROWS, DP])
    return x


@triton.jit
def _rotated_queries(x, D: tl.constexpr):
    """(low half, high half, sums [rows]) of rotated queries, whose products with rotated keys are the queries' own."""
    ROWS: tl.constexpr = x.shape[0]
    SIZE: tl.constexpr = D & -D
    wide = _rotate(x.to(tl.float32), ROWS, x.shape[1], SIZE) * (1.0 / SIZE)
    rotated = wide.to(x.dtype)
    low, high = _halves(rotated, ROWS, x.shape[1])
    return low, high, tl.sum(rotated.to(tl.float32), 1)


@triton.jit
def _numbers(both, DTYPE: tl.constexpr):
    """The halves of vectors as numbers from -8 to 7. They become bfloat16 as its lowest bits between 128 and 256."""
    bits = both.to(tl.int16)
    low = ((bits & 15) | 0x4300).to(tl.bfloat16, bitcast=True).to(DTYPE) - 136.0
    high = ((bits >> 4) | 0x4300).to(tl.bfloat16, bitcast=True).to(DTYPE) - 136.0
    return low.to(DTYPE), high.to(DTYPE)


@triton.jit
def _load_numbers(ptr, where, d, D: tl.constexpr, DP: tl.constexpr, DTYPE: tl.constexpr):
    """The same from memory; `d` [DP / 2]: bytes of a vector."""
    if DP == D:
        return _numbers(tl.load(ptr + where), DTYPE)
    else:
        return _numbers(tl.load(ptr + where, mask=(d < D // 2)[None, :], other=0), DTYPE)


@triton.jit
def _scale_and_offset(word):
    """(scale, what is added) of the numbers of a vector, from its word."""
    scale = (word << 16).to(tl.float32, bitcast=True)
    return scale, (word & -65536).to(tl.float32, bitcast=True) + 8.0 * scale


@triton.jit
def _wide_vectors(halves, scale, added, is_rotated, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """float32 [ROWS, DP]: vectors as they were before rounding; keys are rotated back."""
    SIZE: tl.constexpr = D & -D
    x = _from_halves(halves[0], halves[1], ROWS, DP) * scale[:, None] + added[:, None]
    d = tl.arange(0, DP)
    back = _rotate(tl.where((d < D)[None, :], x, 0.0), ROWS, DP, SIZE) * (1.0 / SIZE)
    return tl.where(is_rotated, back, x)


@triton.jit
def _bfloat16(x):
    """(float32 rounded to bfloat16, its bits as int32)."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & -65536
    return bits.to(tl.float32, bitcast=True), bits


@triton.jit
def _store_four_bits(x, is_key, places, words_ptr, cached, HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Round vectors [HEADS, DP], keys rotated first, and store their bytes at `places` and their words."""
    SIZE: tl.constexpr = D & -D
    inside = (tl.arange(0, DP) < D)[None, :]
    x = x.to(tl.float32)
    x = tl.where(is_key[:, None], _rotate(x, HEADS, DP, SIZE), x)
    least, most = tl.min(tl.where(inside, x, float("inf")), 1), tl.max(tl.where(inside, x, float("-inf")), 1)
    lowest, lowest_bits = _bfloat16(least)
    scale, scale_bits = _bfloat16(tl.div_rn(most - least, tl.full([HEADS], 15.0, tl.float32)))
    scale_bits = tl.where(scale > 0, scale_bits, 0x3F800000)
    scale = tl.where(scale > 0, scale, 1.0)
    numbers = tl.div_rn(x - lowest[:, None], scale[:, None] + tl.zeros(x.shape, tl.float32))
    numbers = tl.minimum(tl.maximum(numbers, 0.0), 15.0)
    numbers = (numbers + 12582912.0) - 12582912.0  # 1.5 * 2^23: the sum has no bits after the point, ties to even
    low, high = _halves(numbers.to(tl.int32), HEADS, DP)
    d = tl.arange(0, DP // 2)
    tl.store(places + d[None, :], (low | high << 4).to(tl.uint8), mask=cached[:, None] & (d < D // 2)[None, :])
    tl.store(words_ptr, (scale_bits >> 16 & 0xFFFF) | lowest_bits, mask=cached)
