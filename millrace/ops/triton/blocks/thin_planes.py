"""Q2_K and Q3_K in planes for the matrix instruction: as many bytes as in the file, in another order.

The order of codes is that of `planes.py`: thread (g, t) of a warp has four fields j = 2 a + b of 16 outputs by 64
inputs, and the code of input 32 a + 8 t + 4 b + 2 h + e and output g + 8 r is number i = 2 h + r of field j.

    lower    int16 [N / 16, K / 64 * 128]           two bits from 8 e + 2 i
    upper    uint8 [N / 16, K / 64 * 128]           Q3_K: the third bit, at 4 e + i

A scale belongs to 16 inputs, those of an `a` and a t / 2:

    Q2_K     uint8 [N / 16, K / 64, 2, 8, 4]        a factor in the lower four bits, that of the minimum in the upper
                                                    ones (t / 2, g, a, r)
             int32 [N / 16, K / 256, 16]            the float16 that multiplies factors, and that of the minima
    Q3_K     int16 [N / 16, K / 256, 3, 2, 16]      factors plus 32 of six bits: words 0 to 2 have those of a = 0 and 1
                                                    of 64 inputs each in their lower 12 bits, and those of the last 64
                                                    in their upper four (t / 2, g, r)
             int16 [N / 16, K / 256, 16]            the float16 that multiplies factors

A value is factor * (code - 4) in Q3_K. In Q2_K it is factor * code - minimum, computed as factor * (code - 2) + (2 *
factor - minimum), see `planes.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from millrace.ops.triton.grouped.layout import INPUTS, OUTPUTS, WORDS

KINDS: Final = ("Q2_K", "Q3_K")
ITEMS: Final = 256
"""Inputs of a block."""
_SLICE = 1024
"""Outputs packed at a time, which bounds the memory that packing takes."""


@dataclass(frozen=True, slots=True)
class ThinWeight:
    """A weight [N, K] in the layout of this module."""

    kind: str
    lower: Tensor
    upper: Tensor
    """Q2_K: none, any tensor in its place."""
    scales: Tensor
    heads: Tensor
    """The last tensor of the layout."""
    outputs: int
    inputs: int
    dtype: torch.dtype

    @property
    def has_upper(self) -> bool:
        return self.kind == "Q3_K"

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in (self.lower, self.scales, self.heads)) + self.has_upper * self.upper.nbytes

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.lower, self.upper, self.scales, self.heads


def fits(kind: str, outputs: int, inputs: int) -> bool:
    return kind in KINDS and outputs % OUTPUTS == 0 and inputs % ITEMS == 0


def pack(kind: str, blocks: Tensor, inputs: int, dtype: torch.dtype) -> ThinWeight:
    """uint8 [N, bytes of a row] as in the file."""
    outputs = blocks.shape[0]
    make = _two_bits if kind == "Q2_K" else _three_bits
    parts = [make(part.view(len(part), inputs // ITEMS, -1)) for part in blocks.split(_SLICE)]
    lower, upper, scales, heads = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return ThinWeight(kind, lower, upper, scales, heads, outputs, inputs, dtype)


Planes = tuple[Tensor, Tensor, Tensor, Tensor]


def _two_bits(blocks: Tensor) -> Planes:
    """uint8 [N, blocks, 84]: factors, codes, two float16."""
    lower = _in_order(_codes(blocks[..., 16:80]), 2, torch.int16)
    return lower, lower[:0], _by_sixteen(blocks[..., :16]), _by_tile(_numbers(blocks[..., 80:84], torch.int32))


def _three_bits(blocks: Tensor) -> Planes:
    """uint8 [N, blocks, 110]: third bits, codes, factors of six bits, a float16."""
    lower = _in_order(_codes(blocks[..., 32:96]), 2, torch.int16)
    third = torch.stack([(blocks[..., :32] >> group) & 1 for group in range(8)], dim=-2)
    upper = _in_order(third.flatten(1), 1, torch.uint8)
    halves = torch.cat((blocks[..., 96:104] & 15, blocks[..., 96:104] >> 4), dim=-1)
    two = torch.cat([(blocks[..., 104:108] >> shift) & 3 for shift in (0, 2, 4, 6)], dim=-1)
    factors = (halves | (two << 4)).int().unflatten(-1, (4, 2, 2))  # [N, blocks, 64 inputs, a, t / 2]
    words = factors[..., 0, :] | (factors[..., 1, :] << 6)
    last = torch.stack([(words[..., 3, :] >> shift) & 15 for shift in (0, 4, 8)], dim=-2)
    packed = (words[..., :3, :] | (last << 12)).to(torch.int16)
    return lower, upper, _by_tile(packed), _by_tile(_numbers(blocks[..., 108:110], torch.int16))


def _codes(packed: Tensor) -> Tensor:
    """uint8 [N, blocks, 64] -> [N, K], two bits each."""
    halves = packed.unflatten(-1, (2, 1, 32))
    return torch.cat([(halves >> shift) & 3 for shift in (0, 2, 4, 6)], dim=-2).flatten(1)


def _in_order(codes: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """uint8 [N, K] -> [N / 16, K / 64 * 128]: bits from 4 `bits` e + `bits` i of each field."""
    outputs, inputs = codes.shape
    # [tile, r, g, block, a, t, b, h, e] -> [tile, block, g, t, a, b, e, h, r]
    parts = codes.view(outputs // OUTPUTS, 2, 8, inputs // INPUTS, 2, 4, 2, 2, 2).permute(0, 3, 2, 5, 4, 6, 8, 7, 1)
    numbers = parts.reshape(outputs // OUTPUTS, inputs // INPUTS * WORDS, 8).int()
    total = sum(numbers[..., place] << (bits * place) for place in range(8))
    assert isinstance(total, Tensor)
    return total.to(dtype)


def _by_sixteen(factors: Tensor) -> Tensor:
    """A byte of each 16 inputs, [N, blocks, 16] -> [N / 16, K / 64, 2, 8, 4]."""
    outputs = factors.shape[0]
    # [tile, r, g, block of 64, a, t / 2] -> [tile, block of 64, t / 2, g, a, r]
    factors = factors.reshape(outputs // OUTPUTS, 2, 8, -1, 2, 2).permute(0, 3, 5, 2, 4, 1)
    return factors.reshape(outputs // OUTPUTS, -1, 2, 8, 4).contiguous()


def _numbers(pieces: Tensor, dtype: torch.dtype) -> Tensor:
    return pieces.contiguous().view(dtype).squeeze(-1)


def _by_tile(numbers: Tensor) -> Tensor:
    """[N, ...] -> [N / 16, ..., 16], by (g, r)."""
    outputs = numbers.shape[0]
    parts = numbers.reshape(outputs // OUTPUTS, 2, 8, -1).permute(0, 3, 2, 1)
    return parts.reshape(outputs // OUTPUTS, *numbers.shape[1:], OUTPUTS).contiguous()
