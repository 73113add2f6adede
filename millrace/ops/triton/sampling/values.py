"""What the sampling kernels share: reading logits, ordering and weighing them, and the random number of a draw."""

from __future__ import annotations

import triton
import triton.language as tl

from millrace.ops.triton.kernel_keys import settle_keys

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_NO_TOKEN = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _read(logits, line, offsets, inside, raw_end, ALIGN: tl.constexpr):
    """Values at offsets below `raw_end` from the model's logits, others from the float32 buffer `line`. NaN reads as
    -inf.

    `raw_end` is a multiple of ALIGN; the division shows this to the compiler, which can then use wide loads.
    """
    raw_end = (raw_end // ALIGN) * ALIGN
    raw = tl.load(logits + offsets, mask=offsets < raw_end, other=float("-inf")).to(tl.float32)
    other = tl.load(line + offsets, mask=inside & (offsets >= raw_end), other=float("-inf"))
    value = tl.where(offsets < raw_end, raw, other)
    return tl.where(value == value, value, float("-inf"))


@triton.jit
def _weight(value, peak, scale):
    """The unnormalised probability. In a row without a finite value all tokens weigh the same."""
    return tl.exp(tl.where(value == peak, 0.0, (value - peak) * scale))


@triton.jit
def _key(value, shift):
    """An integer with the same order as the value, without the `shift` low bits that are always zero."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> shift).to(tl.int64)


@triton.jit
def _unkey(key, shift):
    """The lowest value with this key."""
    bits = (key << shift.to(tl.int64)).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _greatest(value, token):
    """Maximum of a block, value and token packed into one integer: the greatest value with the lowest token."""
    order = _key(value, 0) << 32
    return tl.max(order | (token ^ _NO_TOKEN).to(tl.int64), 0)


@triton.jit
def _token_of(packed):
    return ((packed & 0x7FFFFFFF) ^ _NO_TOKEN).to(tl.int32)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    return x ^ (x >> 31)


@triton.jit
def _uniform(seed, position):
    """Random number in [0, 1) with 53 bits, the same as in run/sampling/noise.py."""
    state = _mix(seed.to(tl.uint64, bitcast=True) + _GOLDEN)
    state = _mix(state ^ (position.to(tl.int64).to(tl.uint64, bitcast=True) * _GOLDEN + _MIX_1))
    return (state >> 11).to(tl.float64) * 1.1102230246251565e-16


settle_keys(globals())
