"""Four bits: keys and values as integers from 0 to 15, with a scale and a lowest number for each vector.

A key or value of D numbers takes D/2 bytes and one 32-bit word with both bfloat16: the scale in its lower half, the
lowest number in its upper half. Byte i of each eight bytes holds number i of sixteen in its lower half and number i + 8
in its upper half.

Keys have a few large channels, which would take the range of all others. So a key is rotated before it is rounded, by
Walsh-Hadamard transforms of as many numbers as the largest power of two that divides D; each of its numbers then
depends on all channels. A query rotated in the same way has the same products with it, times the transform's size.
Values have no such channels and are kept as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 15
UNIT = 16
"""Numbers whose bits share eight bytes."""


def rotation_size(head_dim: int) -> int:
    """Numbers that are transformed together."""
    return head_dim & -head_dim


def rotate(vectors: Tensor) -> Tensor:
    """Transform float32 [..., D]. Twice gives the vectors times `rotation_size`."""
    size, half = rotation_size(vectors.shape[-1]), 1
    while half < size:
        pairs = vectors.reshape(*vectors.shape[:-1], -1, 2, half)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        vectors = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        half *= 2
    return vectors


def to_four_bits(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes uint8 [..., D/2], and scales with lowest numbers, bfloat16 [..., 2], of float32 [..., D]."""
    lowest = vectors.amin(dim=-1).to(torch.bfloat16)
    scale = ((vectors.amax(dim=-1) - vectors.amin(dim=-1)) / LARGEST).to(torch.bfloat16)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    numbers = ((vectors - lowest.float()[..., None]) / scale.float()[..., None]).round().clamp(0, LARGEST)
    halves = numbers.to(torch.uint8).reshape(*numbers.shape[:-1], -1, 2, UNIT // 2)
    return (halves[..., 0, :] | halves[..., 1, :] << 4).flatten(-2), torch.stack((scale, lowest), dim=-1)


def from_four_bits(packed: Tensor, scales: Tensor) -> Tensor:
    """The inverse: float32 [..., D]."""
    eights = packed.reshape(*packed.shape[:-1], -1, UNIT // 2)
    numbers = torch.stack((eights & LARGEST, eights >> 4), dim=-2).flatten(-3).float()
    return numbers * scales[..., :1].float() + scales[..., 1:].float()
