"""Rewrites blocks of GGUF's I-quants, of MXFP4 and of ternary numbers as integers that the kernels read.

Codes of IQ1 to IQ3 are places in large tables: 256 inputs become one block of 274 bytes, a float16, sixteen signed
8-bit scales and 256 integers, where a value is integer * (float16 * (scale / 8)). MXFP4 gets float16 scales. TQ1_0 and
TQ2_0, whose numbers are -1, 0 and 1 times a scale, become Q2_K. The numbers stay the same, bit by bit; scales of MXFP4
below 2^-23 become 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import gguf
import numpy as np
import numpy.typing as npt

from millrace.errors import ModelError

Bytes = npt.NDArray[np.uint8]
Integers = npt.NDArray[Any]

CHUNK_BLOCKS = 1 << 13
_ITEMS = 256


class Parts(NamedTuple):
    """Decoded blocks of 256 inputs."""

    integers: Integers
    """[blocks, 256]"""
    scales: Integers
    """[blocks, 16], or 8 of 32 inputs each."""
    halves: npt.NDArray[np.float16]
    """[blocks]"""


def byte_blocks(kind: str, rows: Bytes) -> Bytes:
    """Rows [N, bytes] as rows of MXFP4 with float16 scales, of Q2_K (TQ1_0, TQ2_0), else of blocks of 274 bytes."""
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    blocks = np.ascontiguousarray(rows).reshape(-1, size)
    plain = {"MXFP4": _with_halves, "TQ1_0": _q2_k_of_thirds, "TQ2_0": _q2_k}
    write: Callable[[Bytes], Bytes] = plain.get(kind) or (lambda some: _written(_DECODERS[kind](some)))
    written = [write(blocks[start : start + CHUNK_BLOCKS]) for start in range(0, len(blocks), CHUNK_BLOCKS)]
    return np.concatenate(written).reshape(len(rows), -1)


def _written(parts: Parts) -> Bytes:
    scales = np.repeat(parts.scales, 16 // parts.scales.shape[1], axis=1)
    columns = (parts.halves.reshape(-1, 1), scales.astype(np.int8), parts.integers.astype(np.int8))
    return np.concatenate([np.ascontiguousarray(column).view(np.uint8) for column in columns], axis=1)


def _with_halves(blocks: Bytes) -> Bytes:
    """MXFP4: half of a scale is one of float16 if it is not too large. The levels are then twice the numbers."""
    exponents = blocks[:, :1].astype(np.int32) - 128
    if exponents.max(initial=0) > 15:
        raise ModelError(
            "A scale of the MXFP4 weights is above 2^16, which the CPU kernels cannot hold. Download the file again, or"
            " serve it on a GPU."
        )
    return np.concatenate((np.ldexp(np.float16(1), exponents).view(np.uint8), blocks[:, 1:]), axis=1)


def _q2_k(blocks: Bytes) -> Bytes:
    """Codes minus one, times the scale: the offset of every 16 inputs is the scale too."""
    ones = np.full((len(blocks), 16), 0x11, dtype=np.uint8)
    return np.concatenate((ones, blocks, blocks[:, 64:]), axis=1)


def _q2_k_of_thirds(blocks: Bytes) -> Bytes:
    """Each byte holds five numbers to the base of three."""
    unscaled = blocks.copy()
    unscaled[:, 52:] = np.array([1], dtype=np.float16).view(np.uint8)
    numbers = gguf.quants.dequantize(unscaled, gguf.GGMLQuantizationType.TQ1_0).reshape(-1, 2, 4, 32)
    codes = (numbers + 1).astype(np.uint8) << np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    return _q2_k(np.concatenate((codes.sum(axis=2, dtype=np.uint8).reshape(len(blocks), -1), blocks[:, 52:]), axis=1))


# --- parts of blocks ---


def _nibble_pairs(packed: Bytes) -> Integers:
    """[..., n] to [..., 2 n]: low and high half of each byte in turn."""
    return np.stack((packed & 15, packed >> 4), axis=-1).reshape(len(packed), -1).astype(np.int16)


def _fields(packed: Bytes, bits: int) -> Integers:
    """[blocks, n] to [blocks, n * 8 / bits]: the fields of each byte, the lowest first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return ((packed[:, :, None] >> shifts) & ((1 << bits) - 1)).reshape(len(packed), -1).astype(np.int16)


def _words(packed: Bytes, dtype: str) -> Integers:
    return np.ascontiguousarray(packed).view(dtype)


def _half(blocks: Bytes) -> npt.NDArray[np.float16]:
    """The float16 at the start of each block."""
    return np.ascontiguousarray(blocks[:, :2]).view(np.float16).reshape(-1)


def _grid(kind: str) -> npt.NDArray[np.int8]:
    """[codes, 4 or 8]: the numbers that a code stands for."""
    table: Any = getattr(gguf.quants, kind)
    table.init_grid()
    return np.ascontiguousarray(table.grid.reshape(-1, table.grid_shape[1]).astype(np.int8))


def _with_signs(values: Integers, signs: Bytes) -> Integers:
    """`values` [blocks, groups of 8, 8], `signs` [blocks, groups of 8]: a bit is set for a negative number."""
    bits = np.unpackbits(signs[..., None], axis=-1, bitorder="little").astype(np.int8)
    return (values * (1 - 2 * bits)).reshape(len(values), -1)


def _seven_signs(fields: Integers) -> Bytes:
    """The sign of the last of eight numbers is the parity of the seven bits that hold the others'."""
    parity = fields ^ (fields >> 4)
    parity = parity ^ (parity >> 2)
    parity = (parity ^ (parity >> 1)) & 1
    signs: Bytes = (fields | (parity << 7)).astype(np.uint8)
    return signs


def _from_words(words: Integers) -> tuple[Bytes, Integers]:
    """Words [blocks, 8] of four fields of seven signs and a scale of four bits: (signs [blocks, 32], scales)."""
    fields = (words[:, :, None] >> np.array([0, 7, 14, 21], dtype=np.uint32)) & np.uint32(127)
    return _seven_signs(fields.reshape(len(words), -1)), (words >> np.uint32(28)).astype(np.int16)


# --- formats ---


def _iq2_xxs(blocks: Bytes) -> Parts:
    words = _words(blocks[:, 2:], "<u4").reshape(-1, 8, 2)
    codes = np.ascontiguousarray(words[..., 0]).view(np.uint8).reshape(-1, 32)
    signs, scales = _from_words(words[..., 1])
    return Parts(_with_signs(_grid("IQ2_XXS")[codes], signs), 2 * scales + 1, _half(blocks))


def _iq2_xs(blocks: Bytes) -> Parts:
    codes = _words(blocks[:, 2:66], "<u2")
    values = _with_signs(_grid("IQ2_XS")[codes & 511], _seven_signs(codes >> 9))
    return Parts(values, 2 * _nibble_pairs(blocks[:, 66:]) + 1, _half(blocks))


def _iq2_s(blocks: Bytes) -> Parts:
    codes = blocks[:, 2:34] | (_fields(blocks[:, 66:74], 2) << 8)
    values = _with_signs(_grid("IQ2_S")[codes], blocks[:, 34:66])
    return Parts(values, 2 * _nibble_pairs(blocks[:, 74:]) + 1, _half(blocks))


def _iq3_xxs(blocks: Bytes) -> Parts:
    signs, scales = _from_words(_words(blocks[:, 66:], "<u4"))
    values = _grid("IQ3_XXS")[blocks[:, 2:66]].reshape(-1, 32, 8)
    return Parts(_with_signs(values, signs), 4 * scales + 2, _half(blocks))


def _iq3_s(blocks: Bytes) -> Parts:
    codes = blocks[:, 2:66] | (_fields(blocks[:, 66:74], 1) << 8)
    values = 8 * _grid("IQ3_S")[codes].reshape(-1, 32, 8)
    return Parts(_with_signs(values, blocks[:, 74:106]), 2 * _nibble_pairs(blocks[:, 106:]) + 1, _half(blocks))


def _iq1_s(blocks: Bytes) -> Parts:
    packed = _words(blocks[:, 34:], "<u2").astype(np.int32)
    upper = (packed[:, :, None] >> np.array([0, 3, 6, 9])) & 7
    codes = blocks[:, 2:34] | (upper.reshape(-1, 32) << 8)
    moved = np.where(packed & 0x8000, -1, 1).astype(np.int8)[:, :, None]
    values = (8 * _grid("IQ1_S")[codes]).reshape(-1, 8, 32) + moved
    return Parts(values.reshape(-1, _ITEMS), 2 * ((packed >> 12) & 7) + 1, _half(blocks))


def _iq1_m(blocks: Bytes) -> Parts:
    extra = _nibble_pairs(blocks[:, 32:48])
    codes = blocks[:, :32] | ((extra & 7) << 8)
    moved = np.where(extra & 8, -1, 1).astype(np.int8)[:, :, None]
    values = (8 * _grid("IQ1_S")[codes]) + moved
    words = _words(blocks[:, 48:56], "<u2")
    halves = (words >> 12) << np.array([0, 4, 8, 12], dtype=np.uint16)
    scales = (words[:, :, None] >> np.array([0, 3, 6, 9], dtype=np.uint16)) & 7
    whole = np.bitwise_or.reduce(halves, axis=1).astype(np.uint16).view(np.float16)
    return Parts(values.reshape(-1, _ITEMS), 2 * scales.reshape(-1, 16).astype(np.int16) + 1, whole)


_DECODERS: dict[str, Callable[[Bytes], Parts]] = {
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
}
