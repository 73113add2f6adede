"""Tiles of 128 inputs from blocks whose codes are loaded as words, each byte once: Q4_K, Q5_K, Q6_K and IQ4_XS.

The order of a tile's inputs is that of (groups, shifts within a byte, words, bytes of a word); codes are broadcast into
it, so that no number is moved between threads.
"""

from __future__ import annotations

import triton
import triton.language as tl

LEVELS_LOW = tl.constexpr(-654466911485192063)
"""Bytes: the first eight levels of IQ4_NL."""
LEVELS_HIGH = tl.constexpr(8167635493787864321)
"""The last eight."""


@triton.jit
def _words(at):
    return tl.load(at.to(tl.pointer_type(tl.int32)))


@triton.jit
def _shorts(at):
    return tl.load(at.to(tl.pointer_type(tl.uint16))).to(tl.int32)


@triton.jit
def _low_half(word):
    return (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _nibbles(words, CHUNKS: tl.constexpr, WORDS: tl.constexpr):
    """[BN, CHUNKS, WORDS] to [BN, CHUNKS, 2, WORDS, 4]: all low halves, then all high halves of each chunk."""
    byte = tl.arange(0, 4)[None, None, None, None, :]
    half = tl.arange(0, 2)[None, None, :, None, None]
    return (words[:, :, None, :, None] >> (8 * byte + 4 * half)) & 15


@triton.jit
def _tile_45(base, part, KIND: tl.constexpr, BN: tl.constexpr):
    """Q4_K, Q5_K: a header of 16 bytes; `part`: 0 or 1, half of the block."""
    head = _words(base)
    k = tl.arange(0, 4)[None, :] * 8
    low = _words(base + 4)[:, None] >> k
    high = _words(base + 8)[:, None] >> k
    mixed = _words(base + 12)[:, None] >> k
    scale = tl.where(part == 0, low & 63, (mixed & 15) | ((low >> 2) & 48)).to(tl.float32)
    minimum = tl.where(part == 0, high & 63, ((mixed >> 4) & 15) | ((high >> 2) & 48)).to(tl.float32)
    scale *= _low_half(head)[:, None]
    minimum *= _low_half(head >> 16)[:, None]
    START: tl.constexpr = 16 if KIND == 12 else 48
    word = tl.arange(0, 8)
    chunk = tl.arange(0, 2)
    at = base[:, None, None] + (START + part * 64 + chunk[None, :, None] * 32 + word[None, None, :] * 4)
    codes = _nibbles(_words(at), 2, 8)
    if KIND == 13:
        fifth = _words(base[:, None] + 16 + word[None, :] * 4)[:, None, None, :, None]
        group = part * 4 + chunk[None, :, None, None, None] * 2 + tl.arange(0, 2)[None, None, :, None, None]
        codes = codes | (((fifth >> (tl.arange(0, 4)[None, None, None, None, :] * 8 + group)) & 1) << 4)
    numbers = tl.reshape(codes.to(tl.float32), [BN, 4, 32])
    return tl.reshape(numbers * scale[:, :, None] - minimum[:, :, None], [BN, 128])


@triton.jit
def _tile_6(base, part, BN: tl.constexpr):
    """Q6_K: blocks of 210 bytes start at even addresses only."""
    chunk = tl.arange(0, 2)
    word = tl.arange(0, 16)
    at = base[:, None, None] + (part * 64 + chunk[None, :, None] * 32 + word[None, None, :] * 2)
    half = tl.arange(0, 2)[None, :, None, None, None]
    byte = tl.arange(0, 2)[None, None, None, None, :] * 8
    low = (_shorts(at)[:, None, :, :, None] >> (byte + 4 * half)) & 15
    upper = _shorts(base[:, None] + 128 + part * 32 + word[None, :] * 2)[:, None, None, :, None]
    upper = (upper >> (byte + 4 * half + 2 * chunk[None, None, :, None, None])) & 3
    numbers = tl.reshape(((low | (upper << 4)) - 32).to(tl.float32), [BN, 8, 16])
    own = tl.load(base[:, None] + 192 + part * 8 + tl.arange(0, 8)[None, :]).to(tl.int8, bitcast=True)
    scales = _low_half(_shorts(base + 208))[:, None] * own.to(tl.float32)
    return tl.reshape(numbers * scales[:, :, None], [BN, 128])


@triton.jit
def _tile_levels(base, part, BN: tl.constexpr):
    """IQ4_XS: codes are places among sixteen levels, which are bytes of two constants."""
    group = tl.arange(0, 4)
    at = base[:, None, None] + (8 + part * 64 + group[None, :, None] * 16 + tl.arange(0, 4)[None, None, :] * 4)
    codes = _nibbles(_words(at), 4, 4)
    levels = tl.where(codes < 8, LEVELS_LOW, LEVELS_HIGH) >> ((codes & 7) * 8).to(tl.int64)
    numbers = tl.reshape(levels.to(tl.int8).to(tl.float32), [BN, 4, 32])
    head = _words(base)
    low = (_words(base + 4)[:, None] >> (part * 16 + group[None, :] * 4)) & 15
    high = (head[:, None] >> (16 + part * 8 + group[None, :] * 2)) & 3
    scales = _low_half(head)[:, None] * ((low | (high << 4)) - 32).to(tl.float32)
    return tl.reshape(numbers * scales[:, :, None], [BN, 128])


@triton.jit
def tile_of_words(blocks, outputs, first, K, row_bytes, KIND: tl.constexpr, BYTES: tl.constexpr, BN: tl.constexpr):
    """As `decode_tile`, of 128 inputs."""
    start = tl.minimum(first, K - 128)
    base = blocks + outputs * row_bytes + start // 256 * BYTES
    part = start % 256 // 128
    if KIND == 14:
        return _tile_6(base, part, BN)
    elif KIND == 23:
        return _tile_levels(base, part, BN)
    else:
        return _tile_45(base, part, KIND, BN)
