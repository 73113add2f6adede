"""Dequantises GGUF blocks, bit-equal to the reference in the `gguf` package.

A format is a function from raw blocks to small integers with one scale (and, in some formats, one offset) per group:
value = integer * scale + offset, each operation rounded to float32. Formats without such a function use the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as T

from millrace.errors import ModelError

Bytes = npt.NDArray[np.uint8]

MXFP4_LEVELS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the value of each code of MXFP4; a block's first byte is the exponent of two of its scale, plus 127."""

CHUNK_ITEMS = 1 << 19
"""Items decoded at once: few enough for the CPU cache, enough to hide the call overhead."""

PLAIN: dict[T, torch.dtype] = {T.F32: torch.float32, T.F16: torch.float16, T.BF16: torch.bfloat16}


class Groups(NamedTuple):
    """Decoded blocks: integers [blocks, groups, items]; scales and optional offsets float32 [blocks, groups]."""

    integers: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None = None


def stored_dtype(kind: T) -> torch.dtype:
    """The default dtype of a tensor of this kind."""
    return PLAIN.get(kind, torch.float32)


def check_supported(kind: T, what: str) -> None:
    """Raise ModelError for kinds that the reference cannot decode (intermediate formats, integers)."""
    if kind in PLAIN or kind in _DECODERS:
        return
    try:
        gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
    except NotImplementedError as error:
        raise ModelError(
            f"{what} has the type {kind.name}, which cannot be dequantised. Use a file with another quantisation."
        ) from error


def dequantise(raw: Bytes, kind: T, out: torch.Tensor) -> None:
    """Decode contiguous blocks into the contiguous CPU tensor `out`; rounded once more if it is not float32."""
    if kind in PLAIN:
        out.view(-1).copy_(_as_tensor(raw.reshape(-1)).view(PLAIN[kind]))
        return
    block_items, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks, flat = raw.reshape(-1, block_bytes), out.view(-1, block_items)
    step = max(1, CHUNK_ITEMS // block_items)
    scratch = None if out.dtype == torch.float32 else torch.empty(min(step, len(blocks)), block_items)
    for start in range(0, len(blocks), step):
        chunk, target = blocks[start : start + step], flat[start : start + step]
        floats = target if scratch is None else scratch[: len(chunk)]
        _decode_chunk(chunk, kind, floats)
        if scratch is not None:
            target.copy_(floats)


def _decode_chunk(blocks: Bytes, kind: T, floats: torch.Tensor) -> None:
    decode = _DECODERS.get(kind)
    if decode is None:
        with np.errstate(all="ignore"):  # damaged scales may be infinite; NumPy should not warn
            one_row = gguf.quants.dequantize(blocks.reshape(1, -1), kind)
        floats.copy_(torch.from_numpy(one_row).view(floats.shape))
        return
    groups = decode(_as_tensor(blocks))
    grouped = floats.view(groups.integers.shape)
    grouped.copy_(groups.integers)
    grouped.mul_(groups.scales.unsqueeze(-1))
    if groups.offsets is not None:
        grouped.add_(groups.offsets.unsqueeze(-1))


def _as_tensor(raw: Bytes) -> torch.Tensor:
    """A copy: the memory map is read-only, and a tensor that shares its memory would be writable."""
    return torch.from_numpy(np.array(raw))


def _halves(raw: torch.Tensor) -> torch.Tensor:
    """Byte pairs as float16 numbers, converted to float32."""
    return raw.contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[..., n] bytes to [..., 2, n]: all low halves, then all high halves."""
    return torch.stack((packed & 15, packed >> 4), dim=-2)


def _bit_fields(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """[..., n] bytes to [..., 8 / bits, n]: the lowest fields of all bytes, then the next, and so on."""
    mask = (1 << bits) - 1
    return torch.stack([(packed >> shift) & mask for shift in range(0, 8, bits)], dim=-2)


def _high_bits_of_32(raw: torch.Tensor) -> torch.Tensor:
    """[n, 4] bytes to [n, 32]: bit i of the little-endian word, worth 16."""
    return torch.from_numpy(np.unpackbits(raw.numpy(), axis=1, bitorder="little")) << 4


# --- blocks of 32 ---


def _q4_0(blocks: torch.Tensor) -> Groups:
    integers = _nibbles(blocks[:, 2:]).view(-1, 1, 32).view(torch.int8) - 8
    return Groups(integers, _halves(blocks[:, :2]))


def _q4_1(blocks: torch.Tensor) -> Groups:
    pair = _halves(blocks[:, :4])
    return Groups(_nibbles(blocks[:, 4:]).view(-1, 1, 32), pair[:, :1], pair[:, 1:])


def _q5_0(blocks: torch.Tensor) -> Groups:
    integers = _nibbles(blocks[:, 6:]).view(-1, 32) | _high_bits_of_32(blocks[:, 2:6])
    return Groups(integers.view(torch.int8).view(-1, 1, 32) - 16, _halves(blocks[:, :2]))


def _q5_1(blocks: torch.Tensor) -> Groups:
    pair = _halves(blocks[:, :4])
    integers = _nibbles(blocks[:, 8:]).view(-1, 32) | _high_bits_of_32(blocks[:, 4:8])
    return Groups(integers.view(-1, 1, 32), pair[:, :1], pair[:, 1:])


def _q8_0(blocks: torch.Tensor) -> Groups:
    return Groups(blocks[:, 2:].view(torch.int8).unsqueeze(1), _halves(blocks[:, :2]))


# --- blocks of 256, with a scale per 16 or 32 ---


def _six_bit_pairs(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Twelve bytes hold eight 6-bit scales and eight 6-bit minima; the last four bytes hold the low bits of the upper
    four of each."""
    scales, minima, mixed = packed[:, :4], packed[:, 4:8], packed[:, 8:12]
    high_scales = (mixed & 15) | ((scales >> 2) & 48)
    high_minima = (mixed >> 4) | ((minima >> 2) & 48)
    return torch.cat((scales & 63, high_scales), 1).float(), torch.cat((minima & 63, high_minima), 1).float()


def _q2_k(blocks: torch.Tensor) -> Groups:
    pair, scales = _halves(blocks[:, 80:84]), blocks[:, :16]
    integers = _bit_fields(blocks[:, 16:80].reshape(-1, 2, 32), bits=2).view(-1, 16, 16)
    return Groups(integers, pair[:, :1] * (scales & 15).float(), -(pair[:, 1:] * (scales >> 4).float()))


def _q3_k(blocks: torch.Tensor) -> Groups:
    low = _nibbles(blocks[:, 96:104]).view(-1, 16)
    high = _bit_fields(blocks[:, 104:108], bits=2).view(-1, 16)
    scales = (low | (high << 4)).view(torch.int8) - 32
    quarters = _bit_fields(blocks[:, 32:96].reshape(-1, 2, 32), bits=2).view(-1, 8, 32)
    absent = _bit_fields(blocks[:, :32].unsqueeze(1), bits=1).view(-1, 8, 32) ^ 1
    integers = quarters.view(torch.int8) - (absent << 2).view(torch.int8)
    return Groups(integers.view(-1, 16, 16), _halves(blocks[:, 108:110]) * scales.float())


def _q4_k(blocks: torch.Tensor) -> Groups:
    pair = _halves(blocks[:, :4])
    scales, minima = _six_bit_pairs(blocks[:, 4:16])
    integers = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).view(-1, 8, 32)
    return Groups(integers, pair[:, :1] * scales, -(pair[:, 1:] * minima))


def _q5_k(blocks: torch.Tensor) -> Groups:
    pair = _halves(blocks[:, :4])
    scales, minima = _six_bit_pairs(blocks[:, 4:16])
    high = _bit_fields(blocks[:, 16:48].unsqueeze(1), bits=1).view(-1, 8, 32) << 4
    integers = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).view(-1, 8, 32) | high
    return Groups(integers, pair[:, :1] * scales, -(pair[:, 1:] * minima))


def _q6_k(blocks: torch.Tensor) -> Groups:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).view(-1, 8, 32)
    high = _bit_fields(blocks[:, 128:192].reshape(-1, 2, 32), bits=2).view(-1, 8, 32)
    integers = (low | (high << 4)).view(torch.int8) - 32
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return Groups(integers.view(-1, 16, 16), _halves(blocks[:, 208:210]) * scales)


# --- blocks whose integers index a table ---


def _look_up(indices: torch.Tensor, values: tuple[int, ...]) -> torch.Tensor:
    """Indices below 16 to signed bytes, through the C loop of `bytes.translate`."""
    table = np.array(values, dtype=np.int8).tobytes().ljust(256, b"\0")
    translated = bytearray(indices.contiguous().numpy().tobytes().translate(table))
    return torch.frombuffer(translated, dtype=torch.int8).view(indices.shape)


def _iq4_nl(blocks: torch.Tensor) -> Groups:
    indices = _nibbles(blocks[:, 2:]).view(-1, 1, 32)
    return Groups(_look_up(indices, gguf.quants.IQ4_NL.kvalues), _halves(blocks[:, :2]))


def _mxfp4(blocks: torch.Tensor) -> Groups:
    """Twice each value is an integer."""
    scales = np.ldexp(np.float32(1), blocks[:, :1].numpy().astype(np.int32) - 128)
    return Groups(_look_up(_nibbles(blocks[:, 1:]).view(-1, 1, 32), MXFP4_LEVELS), torch.from_numpy(scales))


def _iq4_xs(blocks: torch.Tensor) -> Groups:
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), dim=-1).view(-1, 8)
    high = torch.stack([(blocks[:, 2:4] >> shift) & 3 for shift in range(0, 8, 2)], dim=-1).view(-1, 8)
    scales = (low | (high << 4)).view(torch.int8) - 32
    indices = _nibbles(blocks[:, 8:].reshape(-1, 8, 16)).view(-1, 8, 32)
    return Groups(_look_up(indices, gguf.quants.IQ4_NL.kvalues), _halves(blocks[:, :2]) * scales.float())


def _iq2_xxs(blocks: torch.Tensor) -> Groups:
    """Per 32 items: four bytes index a table of 8 magnitudes, four 7-bit fields one of 8 signs, four bits the scale."""
    reference: Any = gguf.quants.IQ2_XXS
    reference.init_grid()
    magnitudes = reference.grid.reshape(256, 8).astype(np.int8).view(np.int64).ravel()
    sign_bits = np.frombuffer(reference.ksigns, dtype=np.uint8)
    signs = (
        (1 - 2 * np.unpackbits(sign_bits[:, None], axis=1, bitorder="little").astype(np.int8)).view(np.int64).ravel()
    )
    words = blocks[:, 2:].contiguous().numpy().view(np.uint32).reshape(-1, 8, 2)
    fields = (words[..., 1:] >> np.array([0, 7, 14, 21], dtype=np.uint32)) & np.uint32(127)
    picked = torch.from_numpy(magnitudes[np.ascontiguousarray(words[..., 0]).view(np.uint8).reshape(-1, 8, 4)])
    integers = picked.view(torch.int8) * torch.from_numpy(signs[fields]).view(torch.int8)
    scales = torch.from_numpy((words[..., 1] >> np.uint32(28)).astype(np.float32))
    return Groups(integers.view(-1, 8, 32), _halves(blocks[:, :2]) * (scales + 0.5) * 0.25)


_DECODERS: dict[T, Callable[[torch.Tensor], Groups]] = {
    T.Q4_0: _q4_0,
    T.Q4_1: _q4_1,
    T.Q5_0: _q5_0,
    T.Q5_1: _q5_1,
    T.Q8_0: _q8_0,
    T.Q2_K: _q2_k,
    T.Q3_K: _q3_k,
    T.Q4_K: _q4_k,
    T.Q5_K: _q5_k,
    T.Q6_K: _q6_k,
    T.IQ4_NL: _iq4_nl,
    T.IQ4_XS: _iq4_xs,
    T.MXFP4: _mxfp4,
    T.IQ2_XXS: _iq2_xxs,
}
