"""Tiles of numbers from GGUF blocks, decoded in registers. The reference is `ops/linear/gguf_values.py`.

A block holds 32 or 256 consecutive inputs of one output, in groups of 16 or 32 that share a scale:
value = integer * scale + offset. Here every number loads its own byte; blocks start at even addresses only, so that
nothing wider than 16 bits can be loaded. `words.py` has the formats that are read by words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import triton
import triton.language as tl

from millrace.ops.triton.blocks.words import tile_of_words


@dataclass(frozen=True, slots=True)
class BlockKind:
    """`code`: the format's name in kernels; `items`: inputs per block; `group`: inputs per scale."""

    code: int
    items: int
    num_bytes: int
    group: int


KINDS: Final = {
    "Q4_0": BlockKind(2, 32, 18, 32),
    "Q4_1": BlockKind(3, 32, 20, 32),
    "Q5_0": BlockKind(6, 32, 22, 32),
    "Q5_1": BlockKind(7, 32, 24, 32),
    "Q8_0": BlockKind(8, 32, 34, 32),
    "Q2_K": BlockKind(10, 256, 84, 16),
    "Q3_K": BlockKind(11, 256, 110, 16),
    "Q4_K": BlockKind(12, 256, 144, 32),
    "Q5_K": BlockKind(13, 256, 176, 32),
    "Q6_K": BlockKind(14, 256, 210, 16),
    "IQ2_XXS": BlockKind(16, 256, 66, 32),
    "IQ2_XS": BlockKind(17, 256, 74, 16),
    "IQ3_XXS": BlockKind(18, 256, 98, 32),
    "IQ1_S": BlockKind(19, 256, 50, 32),
    "IQ4_NL": BlockKind(20, 32, 18, 32),
    "IQ3_S": BlockKind(21, 256, 110, 32),
    "IQ2_S": BlockKind(22, 256, 82, 16),
    "IQ4_XS": BlockKind(23, 256, 136, 32),
    "IQ1_M": BlockKind(29, 256, 56, 16),
}
"""The codes are those of ggml's types."""


@triton.jit
def _byte(at):
    return tl.load(at).to(tl.int32)


@triton.jit
def _two(at):
    """An unsigned number of 16 bits."""
    return tl.load(at.to(tl.pointer_type(tl.uint16))).to(tl.int32)


@triton.jit
def _half(at):
    return tl.load(at.to(tl.pointer_type(tl.float16))).to(tl.float32)


@triton.jit
def _signed(byte):
    return (byte ^ 128) - 128


@triton.jit
def _signed_by_seven(value, field, place):
    """The sign of the last of eight numbers is the parity of the seven bits that hold the others'."""
    parity = field ^ (field >> 4)
    parity = parity ^ (parity >> 2)
    parity = (parity ^ (parity >> 1)) & 1
    bits = field | (parity << 7)
    return tl.where((bits >> place) & 1 != 0, -value, value)


@triton.jit
def _of_32(base, i, KIND: tl.constexpr):
    """Q4_0, Q4_1, Q5_0, Q5_1: (integers, scales, offsets)."""
    HAS_OFFSET: tl.constexpr = KIND == 3 or KIND == 7
    FIFTH: tl.constexpr = KIND == 6 or KIND == 7
    HEAD: tl.constexpr = 4 if HAS_OFFSET else 2
    scales = _half(base)
    codes = (_byte(base[:, :, None] + (HEAD + 4 * FIFTH) + i % 16) >> (i // 16 * 4)) & 15
    if FIFTH:
        codes = codes | (((_byte(base[:, :, None] + HEAD + i // 8) >> (i % 8)) & 1) << 4)
    if HAS_OFFSET:
        offsets = _half(base + 2)
    else:
        codes -= 16 if FIFTH else 8
        offsets = scales * 0.0
    return codes.to(tl.float32), scales, offsets


@triton.jit
def _of_256(base, j, i, KIND: tl.constexpr):
    """Q2_K, Q3_K: (integers, scales, offsets)."""
    at = base[:, :, None]
    pair = i // 128 * 32 + i % 32  # byte of two bits each
    shift = i % 128 // 32 * 2
    if KIND == 10:  # Q2_K
        codes = (_byte(at + 16 + pair) >> shift) & 3
        both = _byte(base + j)
        scales = _half(base + 80) * (both & 15).to(tl.float32)
        offsets = -(_half(base + 82) * (both >> 4).to(tl.float32))
    else:  # Q3_K
        upper = (_byte(at + i % 32) >> (i // 32)) & 1
        codes = ((_byte(at + 32 + pair) >> shift) & 3) + 4 * upper - 4
        low = (_byte(base + 96 + j % 8) >> (j // 8 * 4)) & 15
        high = (_byte(base + 104 + j % 4) >> (j // 4 * 2)) & 3
        scales = _half(base + 108) * ((low | (high << 4)) - 32).to(tl.float32)
        offsets = scales * 0.0
    return codes.to(tl.float32), scales, offsets


@triton.jit
def _from_levels(base, i, table):
    """IQ4_NL: codes are places in a table of 16."""
    codes = (_byte(base[:, :, None] + 2 + i % 16) >> (i // 16 * 4)) & 15
    scales = _half(base)
    return tl.load(table + codes).to(tl.float32), scales, scales * 0.0


@triton.jit
def _nibble_scales(base, at_byte, j):
    return ((_byte(base + at_byte + j // 2) >> (j % 2 * 4)) & 15).to(tl.float32)


@triton.jit
def _from_grid(base, j, i, grid, KIND: tl.constexpr):
    """IQ2 and IQ3: codes are places in a table of 8 or 4 magnitudes each, with signs apart."""
    at = base[:, :, None]
    eight, place = i // 8, i % 8
    if KIND == 16:  # IQ2_XXS
        word = _two(base + 6 + j * 8) | (_two(base + 8 + j * 8) << 16)
        value = tl.load(grid + _byte(at + 2 + i // 32 * 8 + eight % 4) * 8 + place).to(tl.float32)
        value = _signed_by_seven(value, (word[:, :, None] >> (eight % 4 * 7)) & 127, place)
        scales = _half(base) * (((word >> 28) & 15).to(tl.float32) + 0.5) * 0.25
    elif KIND == 17:  # IQ2_XS
        code = _two(at + 2 + eight * 2)
        value = _signed_by_seven(tl.load(grid + (code & 511) * 8 + place).to(tl.float32), code >> 9, place)
        scales = _half(base) * (_nibble_scales(base, 66, j) + 0.5) * 0.25
    elif KIND == 22:  # IQ2_S
        code = _byte(at + 2 + eight) | (((_byte(at + 66 + i // 32) >> (eight % 4 * 2)) & 3) << 8)
        value = tl.load(grid + code * 8 + place).to(tl.float32)
        value = tl.where((_byte(at + 34 + eight) >> place) & 1 != 0, -value, value)
        scales = _half(base) * (_nibble_scales(base, 74, j) + 0.5) * 0.25
    elif KIND == 18:  # IQ3_XXS
        word = _two(base + 66 + j * 4) | (_two(base + 68 + j * 4) << 16)
        value = tl.load(grid + _byte(at + 2 + i // 4) * 4 + i % 4).to(tl.float32)
        value = _signed_by_seven(value, (word[:, :, None] >> (eight % 4 * 7)) & 127, place)
        scales = _half(base) * (((word >> 28) & 15).to(tl.float32) + 0.5) * 0.5
    else:  # IQ3_S
        code = _byte(at + 2 + i // 4) | (((_byte(at + 66 + i // 32) >> (i // 4 % 8)) & 1) << 8)
        value = tl.load(grid + code * 4 + i % 4).to(tl.float32)
        value = tl.where((_byte(at + 74 + eight) >> place) & 1 != 0, -value, value)
        scales = _half(base) * (_nibble_scales(base, 106, j) * 2.0 + 1.0)
    return value, scales, scales * 0.0


@triton.jit
def _of_one_bit(base, j, i, grid, KIND: tl.constexpr):
    """IQ1_S, IQ1_M: -1, 0 or 1 from a table of eight each, all moved by an eighth up or down."""
    at = base[:, :, None]
    eight = i // 8
    if KIND == 19:
        packed = _two(base + 34 + j * 2)
        code = _byte(at + 2 + eight) | (((packed[:, :, None] >> (eight % 4 * 3)) & 7) << 8)
        scales = _half(base) * (((packed >> 12) & 7) * 2 + 1).to(tl.float32)
        moved = tl.where(packed & 0x8000 != 0, -0.125, 0.125)[:, :, None]
    else:
        extra = (_byte(at + 32 + eight // 2) >> (eight % 2 * 4)) & 15
        code = _byte(at + eight) | ((extra & 7) << 8)
        bits = (_two(base + 48) >> 12) | ((_two(base + 50) >> 12) << 4)
        bits = bits | ((_two(base + 52) >> 12) << 8) | ((_two(base + 54) >> 12) << 12)
        whole = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        own = (_two(base + 48 + j // 4 * 2) >> (j % 4 * 3)) & 7
        scales = whole * (own * 2 + 1).to(tl.float32)
        moved = tl.where(extra & 8 != 0, -0.125, 0.125)
    return tl.load(grid + code * 8 + i % 8).to(tl.float32) + moved, scales, scales * 0.0


@triton.jit
def _tile_of_bytes(
    blocks, outputs, first, N, K, row_bytes, table,
    KIND: tl.constexpr, ITEMS: tl.constexpr, BYTES: tl.constexpr, GROUP: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    GROUPS: tl.constexpr = BK // GROUP
    start = tl.minimum(first + tl.arange(0, GROUPS) * GROUP, K - GROUP)
    within = start % ITEMS
    base = blocks + (outputs * row_bytes)[:, None] + (start // ITEMS * BYTES)[None, :]
    i = within[None, :, None] + tl.arange(0, GROUP)[None, None, :]
    j = (within // GROUP)[None, :]
    if KIND == 8:
        values = _signed(_byte(base[:, :, None] + 2 + i)).to(tl.float32)
        scales = _half(base)
        offsets = scales * 0.0
    elif KIND < 8:
        values, scales, offsets = _of_32(base, i, KIND)
    elif KIND < 16:
        values, scales, offsets = _of_256(base, j, i, KIND)
    elif KIND == 20:
        values, scales, offsets = _from_levels(base, i, table)
    elif KIND == 19 or KIND == 29:
        values, scales, offsets = _of_one_bit(base, j, i, table, KIND)
    else:
        values, scales, offsets = _from_grid(base, j, i, table, KIND)
    return tl.reshape(values * scales[:, :, None] + offsets[:, :, None], [BN, BK])


@triton.jit
def decode_tile(
    blocks, outputs, first, N, K, row_bytes, table,
    KIND: tl.constexpr, ITEMS: tl.constexpr, BYTES: tl.constexpr, GROUP: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """float32 [BN, BK]: the numbers of these outputs (int64) from input `first` on. Past the end of the weight they
    are any of its numbers."""
    if KIND == 12 or KIND == 13 or KIND == 14 or KIND == 23:
        tl.static_assert(BK == 128)
        return tile_of_words(blocks, outputs, first, K, row_bytes, KIND, BYTES, BN)
    else:
        return _tile_of_bytes(
            blocks, outputs, first, N, K, row_bytes, table, KIND, ITEMS, BYTES, GROUP, BN, BK
        )  # fmt: skip
