"""bfloat16 numbers in twelve bits: what a GPU's cache of keys and values holds by default.

Of a vector's numbers, each keeps its sign, its seven bits of mantissa, and in four bits how far its exponent is below
the largest of the vector, whose power of two is kept beside it. Nothing is rounded: a number comes back as it was if it
is at least 2^-15 of the largest power of two in its vector, and as 2^-15 of it, with its sign, if it is smaller. That
is a 128th of what bfloat16 itself may round off the largest. Only numbers below 2^-126, which have no exponent of their
own, may be off by as much in a vector that is nearly as small. Infinity or NaN makes all of its vector infinite.

A vector of D numbers is 3D/4 words of sixteen bits. Its first three quarters have a word each, with the sign and the
eleven lowest bits where bfloat16 has them; the four bits that are left carry, nibble by nibble, the twelve bits of the
number in the last quarter. So three quarters are read with one bit operation, and nothing moves between lanes.
"""

from __future__ import annotations

import torch
from torch import Tensor

SIGN, MANTISSA_BITS, KEPT = 0x8000, 7, 0x07FF
"""Of bfloat16: the sign; bits of mantissa; the mantissa and four bits of exponent."""
NIBBLE_AT = 11
FLOAT32_MANTISSA = 23
ONE = 0x3800
"""What the four bits between sign and exponent become, so that the largest numbers of a vector are from 1 to 2."""
FURTHEST = 15
"""The lowest exponent that is kept, below the largest."""


def can_pack(head_dim: int) -> bool:
    """A quarter is what a matrix unit multiplies at once."""
    return head_dim in (64, 128, 256)


def packed_items(head_dim: int) -> int:
    """Words of a vector."""
    return head_dim * 3 // 4


def pack(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """bfloat16 [..., D] as int16 [..., 3D/4], and the scales float32 [...], powers of two or zero."""
    bits = numbers.view(torch.int16).int() & 0xFFFF
    sizes = bits & (SIGN - 1)
    top = sizes.amax(dim=-1) >> MANTISSA_BITS
    kept = (sizes - (top - FURTHEST << MANTISSA_BITS)[..., None]).clamp(0, KEPT)
    quarters = (kept | bits & SIGN).chunk(4, dim=-1)
    last = quarters[3] & KEPT | (quarters[3] & SIGN) >> 4
    words = [quarter | (last >> 4 * index & 15) << NIBBLE_AT for index, quarter in enumerate(quarters[:3])]
    return _sixteen_bits(torch.cat(words, dim=-1)), (top << FLOAT32_MANTISSA).view(torch.float32)


def unpack(words: Tensor, scales: Tensor) -> Tensor:
    """float32 [..., D] of what `pack` gave."""
    first = [word & (SIGN | KEPT) for word in (words.int() & 0xFFFF).chunk(3, dim=-1)]
    nibbles = [word >> NIBBLE_AT & 15 for word in (words.int() & 0xFFFF).chunk(3, dim=-1)]
    last = nibbles[0] | nibbles[1] << 4 | (nibbles[2] & 7) << 8 | (nibbles[2] >> 3) * SIGN
    numbers = _sixteen_bits(torch.cat([*first, last], dim=-1) | ONE).view(torch.bfloat16)
    return numbers.float() * scales[..., None]


def _sixteen_bits(bits: Tensor) -> Tensor:
    return (bits - ((bits & SIGN) << 1)).to(torch.int16)
