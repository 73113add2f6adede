"""GGUF weights in planes for the matrix instruction: as many bytes as in the file, in another order.

The lower four bits of all codes are words as in `ops/triton/grouped/layout.py`: thread (g, t) of a warp has, of 16
outputs by 64 inputs, four words j = 2 a + b, and the code of input 32 a + 8 t + 4 b + 2 h + e and output g + 8 r is
pair i = 2 h + r of word j. Codes of more bits have a second plane in the same order:

    1 bit    uint8  [N / 16, K / 64 * 128]    bit 4 e + i
    2 bits   int16  [N / 16, K / 64 * 128]    bits from 8 e + 2 i
    4 bits   int32  [N / 16, K / 64 * 128]    bits from 16 e + 4 i, like the lower ones

A value is scale * (code - offset), or scale * levels[code]. With PAIR and SIX it is scale * code + minimum, computed
as scale * (code - offset) + (minimum + scale * offset): both numbers are rounded to the model's dtype, and the second
is small if the offset is in the middle of the codes. Scales lie by output g + 8 r, so that neighbouring places hold
both of a thread's outputs:

    HALF     int16 [N / 16, K / 32, 16]       a scale in float16
    PAIR     int32 [N / 16, K / 32, 16]       a scale and a minimum, both in float16
    SIX      int32 [N / 16, K / 256, 4, 16]   a scale and a minimum in float16, which multiply eight pairs of six bits:
                                              words 1 to 3 have two pairs each in their lower 24 bits, and the last two
                                              pairs in their upper 8 bits
    BYTES    uint8 [N / 16, K / 64, 2, 8, 4]  a factor plus 128 of each 16 inputs (t / 2, g, a, r);
             int16 [N / 16, K / 256, 16]      the float16 that multiplies them
    SIGNED   int32 [N / 16, K / 256, 2, 16]   a float16, which multiplies eight signed numbers of six bits: their upper
                                              two bits above the float16, their lower four in the second word
    POWER    uint8 [N / 16, K / 32, 16]       a power of two: its exponent plus 127
    FLOAT    float32 [N / 16, K / 64, 16]     a scale of 64 inputs
    FP8      uint8 [N / 16, K / 64, 2, 8, 4]  a factor in FP8 (e4m3) of each 16 inputs, in the order of BYTES;
             float32 [N / 16, 16]             what multiplies them
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import gguf
import torch
from torch import Tensor

from millrace.ops.triton.grouped.layout import INPUTS, OUTPUTS, WORDS

HALF, PAIR, SIX, BYTES, SIGNED, POWER, FLOAT, FP8 = range(8)
"""Kinds of scales."""
_SLICE = 1024
"""Outputs packed at a time, which bounds the memory that packing takes."""


@dataclass(frozen=True, slots=True)
class PlaneKind:
    """`upper`: bits of a code above its lower four; `multiple`: inputs that share a header; `levels`: the numbers that
    codes of four bits stand for."""

    items: int
    upper: int
    offset: int
    scales: int
    levels: tuple[float, ...] | None = None

    @property
    def multiple(self) -> int:
        return 256 if self.scales in (SIX, BYTES, SIGNED) else INPUTS


_IQ4 = tuple(float(level) for level in gguf.quants.IQ4_NL.kvalues)
KINDS: Final = {
    "Q4_0": PlaneKind(32, 0, 8, HALF),
    "Q4_1": PlaneKind(32, 0, 8, PAIR),
    "Q5_0": PlaneKind(32, 1, 16, HALF),
    "Q5_1": PlaneKind(32, 1, 16, PAIR),
    "Q8_0": PlaneKind(32, 4, 128, HALF),
    "Q4_K": PlaneKind(256, 0, 8, SIX),
    "Q5_K": PlaneKind(256, 1, 16, SIX),
    "Q6_K": PlaneKind(256, 2, 32, BYTES),
    "IQ4_NL": PlaneKind(32, 0, 0, HALF, _IQ4),
    "IQ4_XS": PlaneKind(256, 0, 0, SIGNED, _IQ4),
}


@dataclass(frozen=True, slots=True)
class PlanesWeight:
    """A weight [N, K] in the layout of this module."""

    kind: PlaneKind
    lower: Tensor
    upper: Tensor | None
    scales: Tensor
    factors: Tensor | None
    """The second tensor of BYTES and FP8."""
    outputs: int
    inputs: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        parts = (self.lower, self.upper, self.scales, self.factors)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def places_per_tile(self) -> tuple[int, int]:
        """Of `scales` and `factors`, for 16 outputs."""
        return self.scales[0].numel(), 0 if self.factors is None else self.factors[0].numel()

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What the kernels read; any tensor in place of one that the format does not have."""
        upper = self.lower if self.upper is None else self.upper
        return self.lower, upper, self.scales, self.scales if self.factors is None else self.factors


def fits(kind: PlaneKind | None, outputs: int, inputs: int) -> bool:
    return kind is not None and outputs % OUTPUTS == 0 and inputs % kind.multiple == 0


def pack(kind: str, blocks: Tensor, inputs: int, dtype: torch.dtype) -> PlanesWeight:
    """uint8 [N, bytes of a row] as in the file."""
    outputs = blocks.shape[0]
    parts = [_packed(kind, blocks[first : first + _SLICE], inputs, dtype) for first in range(0, outputs, _SLICE)]

    def joined(name: str) -> Tensor | None:
        tensors = [getattr(part, name) for part in parts]
        return None if tensors[0] is None else torch.cat(tensors)

    lower, scales = joined("lower"), joined("scales")
    assert lower is not None
    assert scales is not None
    return replace(
        parts[0], lower=lower, upper=joined("upper"), scales=scales, factors=joined("factors"), outputs=outputs
    )


def _packed(kind: str, blocks: Tensor, inputs: int, dtype: torch.dtype) -> PlanesWeight:
    outputs, made = blocks.shape[0], KINDS[kind]
    by_block = blocks.view(outputs, inputs // made.items, -1)
    codes = _codes(kind, by_block).reshape(outputs, inputs)
    pairs = _in_order(codes)
    lower = _fields(pairs & 15, 16, 4, torch.int32)
    upper = None
    if made.upper:
        sizes = {1: (4, 1, torch.uint8), 2: (8, 2, torch.int16), 4: (16, 4, torch.int32)}
        upper = _fields(pairs >> 4, *sizes[made.upper])
    scales, factors = _scales(kind, by_block)
    return PlanesWeight(made, lower, upper, scales, factors, outputs, inputs, dtype)


def _in_order(codes: Tensor) -> Tensor:
    """uint8 [N, K] -> [N / 16, K / 64, 128, e, i]"""
    outputs, inputs = codes.shape
    # [tile, r, g, block, a, t, b, h, e] -> [tile, block, g, t, a, b, e, h, r]
    parts = codes.view(outputs // OUTPUTS, 2, 8, inputs // INPUTS, 2, 4, 2, 2, 2).permute(0, 3, 2, 5, 4, 6, 8, 7, 1)
    return parts.reshape(outputs // OUTPUTS, inputs // INPUTS * WORDS, 2, 4)


def _fields(pairs: Tensor, apart: int, bits: int, dtype: torch.dtype) -> Tensor:
    """[..., e, i] -> bits from `apart` e + `bits` i of one number."""
    places = apart * torch.arange(2)[:, None] + bits * torch.arange(4)
    total = torch.zeros(pairs.shape[:-2], dtype=torch.int32, device=pairs.device)
    for e in range(2):
        for i in range(4):
            total |= pairs[..., e, i].int() << int(places[e, i])
    return total.to(dtype)


def _codes(kind: str, blocks: Tensor) -> Tensor:
    """uint8 [N, blocks, bytes] -> [N, blocks, items]: codes before their offset is taken off."""
    if kind == "Q8_0":
        return blocks[..., 2:] ^ 128
    if KINDS[kind].items == 32:
        head = 4 if KINDS[kind].scales == PAIR else 2
        fifth = KINDS[kind].upper
        nibbles = blocks[..., head + 4 * fifth :]
        codes = torch.cat((nibbles & 15, nibbles >> 4), dim=-1)
        if fifth:
            codes = codes | (_bits(blocks[..., head : head + 4]) << 4)
        return codes
    if kind == "IQ4_XS":
        nibbles = blocks[..., 8:].unflatten(-1, (8, 1, 16))
        return torch.cat((nibbles & 15, nibbles >> 4), dim=-2).flatten(-3)
    if kind == "Q6_K":
        low = blocks[..., :128].unflatten(-1, (2, 1, 64))
        low = torch.cat((low & 15, low >> 4), dim=-2).flatten(-2)  # [..., half, 128]
        high = blocks[..., 128:192].unflatten(-1, (2, 1, 32))
        high = torch.cat([(high >> shift) & 3 for shift in (0, 2, 4, 6)], dim=-2).flatten(-2)
        return (low | (high << 4)).flatten(-2)
    nibbles = blocks[..., -128:].unflatten(-1, (4, 1, 32))
    codes = torch.cat((nibbles & 15, nibbles >> 4), dim=-2).flatten(-3)
    if kind == "Q5_K":
        fifth_bits = torch.stack([(blocks[..., 16:48] >> group) & 1 for group in range(8)], dim=-2)
        codes = codes | (fifth_bits.flatten(-2) << 4)
    return codes


def _bits(packed: Tensor) -> Tensor:
    """uint8 [..., bytes] -> [..., 8 bytes], the lowest bit first."""
    return torch.stack([(packed >> place) & 1 for place in range(8)], dim=-1).flatten(-2)


def _scales(kind: str, blocks: Tensor) -> tuple[Tensor, Tensor | None]:
    made = KINDS[kind].scales
    if made == HALF:
        return _by_tile(_numbers(blocks[..., :2], torch.int16)), None
    if made == PAIR:
        return _by_tile(_numbers(blocks[..., :4], torch.int32)), None
    if made == SIX:
        return _six(blocks), None
    if made == SIGNED:  # the file has the float16, the upper bits and the lower bits in this order
        return _by_tile(blocks[..., :8].contiguous().view(torch.int32)), None
    whole = _by_tile(_numbers(blocks[..., 208:210], torch.int16))
    return _by_sixteen(blocks[..., 192:208] ^ 128), whole  # int8 plus 128


def pack_levels(
    codes: Tensor, scales: Tensor, factors: Tensor | None, kind: PlaneKind, dtype: torch.dtype
) -> PlanesWeight:
    """Codes of four bits [N, K / 2] with even inputs in the low halves; scales as they are stored, and `factors`
    [N]."""
    outputs, inputs = codes.shape[0], 2 * codes.shape[1]
    parts = [_in_order(torch.stack((part & 15, part >> 4), dim=2).flatten(1)) for part in codes.split(_SLICE)]
    lower = torch.cat([_fields(part, 16, 4, torch.int32) for part in parts])
    if kind.scales == FP8:
        assert factors is not None
        scales, factors = _by_sixteen(scales.view(torch.uint8)), _by_tile(factors.float())
    else:
        scales = _by_tile(scales.view({HALF: torch.int16, POWER: torch.uint8, FLOAT: torch.float32}[kind.scales]))
    return PlanesWeight(kind, lower, None, scales, factors, outputs, inputs, dtype)


def _by_sixteen(factors: Tensor) -> Tensor:
    """A byte of each 16 inputs, [N, ...] -> [N / 16, K / 64, 2, 8, 4]."""
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


def _six(blocks: Tensor) -> Tensor:
    packed = blocks[..., 4:16].int()
    low, middle, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat((low & 63, (high & 15) | (low >> 6 << 4)), dim=-1)
    minima = torch.cat((middle & 63, (high >> 4) | (middle >> 6 << 4)), dim=-1)
    pairs = (scales | (minima << 6)).unflatten(-1, (4, 2))
    words = pairs[..., 0] | (pairs[..., 1] << 12)
    last = torch.stack([(words[..., 3] >> shift) & 255 for shift in (0, 8, 16)], dim=-1)
    header = _numbers(blocks[..., :4], torch.int32)[..., None]
    return _by_tile(torch.cat((header, words[..., :3] | (last << 24)), dim=-1))
