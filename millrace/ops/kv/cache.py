"""Layouts of the paged KV cache, and the reference that writes and reads it.

Plain: each layer is [2, blocks, kv_heads, block_size, head_dim] in the model's dtype, or in float16
under a float32 model (CPU), with larger numbers clamped to its range; index 0 holds keys, 1 values.

Eight bits: each layer is [2, blocks, kv_heads, block_size, head_dim + SCALE_BYTES] of bytes, uint8 holding FP8 (GPU) or
int8 (CPU). Within a block, each head stores the items of all its tokens, then their float32 scales. Every key and value
has its own scale, which maps its largest item to the largest number of the format; so outliers of other tokens or heads
cost no range, and no calibration is needed.

Four bits: each layer is [2, blocks, kv_heads, block_size, head_dim / 8 + 1] of int32. Within a block, each head
stores the bytes of all its tokens, then a word for each with its scale and lowest number, as in `four_bits.py`.

Packed (GPU): each layer is [2, blocks, kv_heads, block_size, 3 · head_dim / 4 + 2] of int16, bfloat16 in twelve bits as
in `packed.py`. A block stores the words of its heads one after the other, each in three planes: the first third of
every token's words, the second, the last; so each load covers whole memory lines. After the words of the keys come the
scales of all heads and tokens, the key's and the value's bfloat16 side by side, so that one word holds both. The same
space after the values is unused.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from millrace.ops.base.quantised import FP8, FP8_MAX
from millrace.ops.kv.four_bits import from_four_bits, rotate, rotation_size, to_four_bits
from millrace.ops.kv.packed import pack, packed_items, unpack

CacheFormat = Literal["plain", "packed", "fp8", "int4"]
"""Format of a cache on a GPU. Kernels take it as an argument: if their helpers read a module-level constant, Triton's
cache key of a kernel would depend on what was compiled before it."""
SCALE_BYTES = 4
"""Bytes of the scale of an eight-bit key or value."""
SCALE_WORDS = 2
"""16-bit words per token and head for scales in a packed cache: two after the keys; after the values they are
unused."""
SCALE_INT32 = 1
"""32-bit words of the scale and lowest number of a four-bit key or value."""
INT8_MAX = 127
FLOAT16_MAX = 65504


def write_kv(keys_values: Tensor, kv: Tensor, block_ids: Tensor, offsets: Tensor) -> None:
    """Write keys_values [T, 2, kv_heads, head_dim] to each token's slot, at an offset in a block (both int64 [T]). The
    slots of a step are distinct, except in scratch block 0, which is never read."""
    if is_packed(kv):
        items, scales = packed_parts(kv)
        words, powers = pack(keys_values.to(torch.bfloat16))
        scales[:, block_ids, :, offsets] = powers.to(torch.bfloat16)
        items[:, block_ids, :, offsets] = words.view(*words.shape[:-1], *items.shape[-2:])
        return
    if is_four_bit(kv):
        packed, scales = four_bit_parts(kv)
        keys, values = keys_values.float().unbind(1)
        numbers, factors = to_four_bits(torch.stack((rotate(keys), values), dim=1))
        packed[:, block_ids, :, offsets], scales[:, block_ids, :, offsets] = numbers, factors
        return
    if not is_eight_bit(kv):
        if kv.dtype == torch.float16:
            keys_values = keys_values.clamp(-FLOAT16_MAX, FLOAT16_MAX).to(torch.float16)
        kv[:, block_ids, :, offsets] = keys_values.to(kv.dtype)
        return
    max_number = FP8_MAX if is_fp8(kv) else INT8_MAX
    wide = keys_values.float()
    largest = wide.abs().amax(dim=-1)
    scale = torch.where(largest > 0, largest / max_number, torch.ones_like(largest))
    numbers = wide / scale[..., None]
    if is_fp8(kv):
        items, scales = fp8_parts(kv)
        items, numbers = items.view(torch.uint8), numbers.clamp(-max_number, max_number).to(FP8).view(torch.uint8)
    else:
        items, scales = int8_parts(kv)
        numbers = numbers.round().clamp(-max_number, max_number).to(torch.int8)
    items[:, block_ids, :, offsets] = numbers
    scales[:, block_ids, :, offsets] = scale


def read_kv(kv: Tensor, block_ids: Tensor) -> Tensor:
    """Read whole blocks as float32 [2, n, kv_heads, block_size, head_dim]."""
    if is_packed(kv):
        items, scales = packed_parts(kv)
        return unpack(items[:, block_ids].flatten(-2), scales[:, block_ids].float())
    if is_four_bit(kv):
        packed, factors = four_bit_parts(kv)
        keys, values = from_four_bits(packed[:, block_ids], factors[:, block_ids])
        return torch.stack((rotate(keys) / rotation_size(keys.shape[-1]), values))
    if not is_eight_bit(kv):
        return kv[:, block_ids].float()
    if is_fp8(kv):
        items, scales = fp8_parts(kv)
        numbers = items.view(torch.uint8)[:, block_ids].view(FP8)
    else:
        items, scales = int8_parts(kv)
        numbers = items[:, block_ids]
    return numbers.float() * scales[:, block_ids][..., None]


def is_fp8(kv: Tensor) -> bool:
    return kv.dtype == torch.uint8


def is_eight_bit(kv: Tensor) -> bool:
    return kv.dtype in (torch.uint8, torch.int8)


def is_four_bit(kv: Tensor) -> bool:
    return kv.dtype == torch.int32


def is_packed(kv: Tensor) -> bool:
    return kv.dtype == torch.int16


def format_of(kv: Tensor) -> CacheFormat:
    if is_packed(kv):
        return "packed"
    if is_four_bit(kv):
        return "int4"
    return "fp8" if is_fp8(kv) else "plain"


def head_dim_of(kv: Tensor) -> int:
    if is_packed(kv):
        return (kv.shape[4] - SCALE_WORDS) * 4 // 3
    if is_four_bit(kv):
        return (kv.shape[4] - SCALE_INT32) * 8
    return kv.shape[4] - SCALE_BYTES if is_eight_bit(kv) else kv.shape[4]


def fp8_parts(kv: Tensor) -> tuple[Tensor, Tensor]:
    """Views of an FP8 cache: items float8 [2, blocks, kv_heads, block_size, head_dim], and float32 scales without the
    last dimension."""
    return _eight_bit_parts(kv, FP8)


def int8_parts(kv: Tensor) -> tuple[Tensor, Tensor]:
    """The same for an int8 cache."""
    return _eight_bit_parts(kv, torch.int8)


def four_bit_parts(kv: Tensor) -> tuple[Tensor, Tensor]:
    """Views of a four-bit cache: bytes uint8 [2, blocks, kv_heads, block_size, head_dim / 2], and bfloat16 [..., 2],
    the scale and the lowest number of each."""
    block_size, words = kv.shape[3], kv.shape[4] - SCALE_INT32
    flat = kv.flatten(3)
    packed = flat[..., : block_size * words].view(torch.uint8).view(*kv.shape[:4], 4 * words)
    return packed, flat[..., block_size * words :].view(torch.bfloat16).view(*kv.shape[:4], 2)


def _eight_bit_parts(kv: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    block_size, head_dim = kv.shape[3], head_dim_of(kv)
    flat = kv.flatten(3)
    items = flat[..., : block_size * head_dim].view(dtype).view(*kv.shape[:4], head_dim)
    return items, flat[..., block_size * head_dim :].view(torch.float32)


def packed_parts(kv: Tensor) -> tuple[Tensor, Tensor]:
    """Views of a packed cache: words int16 [2, blocks, kv_heads, block_size, 3, head_dim / 4], and bfloat16 scales
    without the last two dimensions."""
    words, flat = packed_items(head_dim_of(kv)), kv.flatten(2)
    first_scale = kv.shape[2] * kv.shape[3] * words
    planes = flat[..., :first_scale].view(*kv.shape[:3], 3, kv.shape[3], words // 3)
    scales = flat[0, :, first_scale:].view(torch.bfloat16).view(*kv.shape[1:4], 2)
    return planes.transpose(3, 4), scales.permute(3, 0, 1, 2)
