"""The packed format: bfloat16 numbers in twelve bits, the default of a GPU's KV cache.

Each number of a vector keeps its sign, its seven mantissa bits and, in four bits, the distance of its exponent from the
largest exponent of the vector, which is stored as a scale. Nothing is rounded: a number of at least 2^-15 times the
vector's largest power of two is exact; a smaller one becomes 2^-15 times that power, with its sign. That is 1/128 of
bfloat16's own rounding error at the largest number. Only subnormals (below 2^-126) can be off by as much, in a vector
whose largest number is nearly as small. Infinity or NaN makes the whole vector infinite.

A vector of D numbers takes 3D/4 16-bit words. Each number of the first three quarters has a word, with its sign and
lowest eleven bits where bfloat16 has them; the four remaining bits of three words hold the twelve bits of a number of
the last quarter, as nibbles. So three quarters are decoded with one bit operation, and nothing moves between lanes.
"""

from __future__ import annotations

import torch
from torch import Tensor

SIGN, MANTISSA_BITS, KEPT = 0x8000, 7, 0x07FF
"""bfloat16: sign bit; number of mantissa bits; mask of the mantissa and four exponent bits."""
NIBBLE_AT = 11
FLOAT32_MANTISSA = 23
ONE = 0x3800
"""Set in the four bits between sign and exponent when unpacking, so that a vector's largest numbers are in [1, 2)."""
FURTHEST = 15
"""Largest distance of an exponent from the vector's largest that is kept."""


def can_pack(head_dim: int) -> bool:
    """A quarter of a head must be a size that the matrix unit multiplies at once."""
    return head_dim in (64, 128, 256)


def packed_items(head_dim: int) -> int:
    """16-bit words per vector."""
    return head_dim * 3 // 4


def pack(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Pack bfloat16 [..., D] into int16 [..., 3D/4] and float32 scales [...], which are powers of two or zero."""
    bits = numbers.view(torch.int16).int() & 0xFFFF
    sizes = bits & (SIGN - 1)
    top = sizes.amax(dim=-1) >> MANTISSA_BITS
    kept = (sizes - (top - FURTHEST << MANTISSA_BITS)[..., None]).clamp(0, KEPT)
    quarters = (kept | bits & SIGN).chunk(4, dim=-1)
    last = quarters[3] & KEPT | (quarters[3] & SIGN) >> 4
    words = [quarter | (last >> 4 * index & 15) << NIBBLE_AT for index, quarter in enumerate(quarters[:3])]
    return _sixteen_bits(torch.cat(words, dim=-1)), (top << FLOAT32_MANTISSA).view(torch.float32)


def unpack(words: Tensor, scales: Tensor) -> Tensor:
    """The inverse of `pack`: float32 [..., D]."""
    first = [word & (SIGN | KEPT) for word in (words.int() & 0xFFFF).chunk(3, dim=-1)]
    nibbles = [word >> NIBBLE_AT & 15 for word in (words.int() & 0xFFFF).chunk(3, dim=-1)]
    last = nibbles[0] | nibbles[1] << 4 | (nibbles[2] & 7) << 8 | (nibbles[2] >> 3) * SIGN
    numbers = _sixteen_bits(torch.cat([*first, last], dim=-1) | ONE).view(torch.bfloat16)
    return numbers.float() * scales[..., None]


def _sixteen_bits(bits: Tensor) -> Tensor:
    return (bits - ((bits & SIGN) << 1)).to(torch.int16)
