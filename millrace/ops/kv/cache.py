"""Writing to and reading from the paged cache, whose layers are [2, blocks, kv_heads, block_size, head_dim].

A cache in eight bits has layers [2, blocks, kv_heads, block_size, head_dim + SCALE_BYTES] of bytes: uint8 with float8
numbers (on a GPU), int8 with whole numbers (on a CPU). Each head's part of a block begins with the numbers of all its
tokens, one token after the other; their float32 scales follow. Every key and every value has a scale of its own: its
largest item takes the largest number there is, so that no outlier of another token or head costs it range, and nothing
has to be measured beforehand.

A packed cache, on a GPU, has layers [2, blocks, kv_heads, block_size, 3 · head_dim / 4 + 2] of int16: bfloat16 numbers
in twelve bits, as in `packed.py`. A block begins with the words of all its heads, one head after the other, each
in three planes: the first third of every token's words, the second, the last. What is read at once is then in whole
lines of memory. Behind the keys follow the scales of all heads and tokens, of each its key's and its value's side by
side in bfloat16, so that both are read as one word. The same place behind the values is not used.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from millrace.ops.kv.packed import pack, packed_items, unpack
from millrace.ops.linear.quantised import FP8, FP8_MAX

CacheFormat = Literal["plain", "packed", "eight"]
"""How a cache on a GPU holds its numbers: as they are, packed, in eight bits. Kernels are handed this: a constant that
their helpers found among a module's names would make Triton's key of a kernel depend on what was compiled before."""
SCALE_BYTES = 4
"""What a key or a value in eight bits takes beside its items."""
SCALE_WORDS = 2
"""The same of a packed one, in words of sixteen bits: of keys their scales' and their values', of values nothing."""
INT8_MAX = 127


def cache_places(slots: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """(block ids, offsets inside the block) of slots [T], both int64. The same for every layer of a step."""
    return slots // block_size, slots % block_size


def write_kv(keys_values: Tensor, kv: Tensor, block_ids: Tensor, offsets: Tensor) -> None:
    """Put keys_values [T, 2, kv_heads, head_dim] at each token's place. Places of one step are distinct,
    except in the scratch block 0, whose content is never read."""
    if holds_packed(kv):
        items, scales = packed_parts(kv)
        words, powers = pack(keys_values.to(torch.bfloat16))
        scales[:, block_ids, :, offsets] = powers.to(torch.bfloat16)
        items[:, block_ids, :, offsets] = words.view(*words.shape[:-1], *items.shape[-2:])
        return
    if not has_eight_bits(kv):
        kv[:, block_ids, :, offsets] = keys_values
        return
    most = FP8_MAX if holds_fp8(kv) else INT8_MAX
    wide = keys_values.float()
    largest = wide.abs().amax(dim=-1)
    scale = torch.where(largest > 0, largest / most, torch.ones_like(largest))
    numbers = wide / scale[..., None]
    if holds_fp8(kv):
        items, scales = fp8_parts(kv)
        items, numbers = items.view(torch.uint8), numbers.clamp(-most, most).to(FP8).view(torch.uint8)
    else:
        items, scales = int8_parts(kv)
        numbers = numbers.round().clamp(-most, most).to(torch.int8)
    items[:, block_ids, :, offsets] = numbers
    scales[:, block_ids, :, offsets] = scale


def read_kv(kv: Tensor, block_ids: Tensor) -> Tensor:
    """Whole blocks [2, n, kv_heads, block_size, head_dim] in float32."""
    if holds_packed(kv):
        items, scales = packed_parts(kv)
        return unpack(items[:, block_ids].flatten(-2), scales[:, block_ids].float())
    if not has_eight_bits(kv):
        return kv[:, block_ids].float()
    if holds_fp8(kv):
        items, scales = fp8_parts(kv)
        numbers = items.view(torch.uint8)[:, block_ids].view(FP8)
    else:
        items, scales = int8_parts(kv)
        numbers = items[:, block_ids]
    return numbers.float() * scales[:, block_ids][..., None]


def holds_fp8(kv: Tensor) -> bool:
    return kv.dtype == torch.uint8


def has_eight_bits(kv: Tensor) -> bool:
    return kv.dtype in (torch.uint8, torch.int8)


def holds_packed(kv: Tensor) -> bool:
    return kv.dtype == torch.int16


def format_of(kv: Tensor) -> CacheFormat:
    if holds_packed(kv):
        return "packed"
    return "eight" if holds_fp8(kv) else "plain"


def head_dim_of(kv: Tensor) -> int:
    if holds_packed(kv):
        return (kv.shape[4] - SCALE_WORDS) * 4 // 3
    return kv.shape[4] - SCALE_BYTES if has_eight_bits(kv) else kv.shape[4]


def fp8_parts(kv: Tensor) -> tuple[Tensor, Tensor]:
    """Views of a cache in eight bits: items float8 [2, blocks, kv_heads, block_size, head_dim], and scales float32
    without the last dimension."""
    return _eight_bit_parts(kv, FP8)


def int8_parts(kv: Tensor) -> tuple[Tensor, Tensor]:
    """The same with items int8."""
    return _eight_bit_parts(kv, torch.int8)


def _eight_bit_parts(kv: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    block_size, head_dim = kv.shape[3], head_dim_of(kv)
    flat = kv.flatten(3)
    items = flat[..., : block_size * head_dim].view(dtype).view(*kv.shape[:4], head_dim)
    return items, flat[..., block_size * head_dim :].view(torch.float32)


def packed_parts(kv: Tensor) -> tuple[Tensor, Tensor]:
    """Views of a packed cache: words int16 [2, blocks, kv_heads, block_size, 3, head_dim / 4], and scales bfloat16
    without the last two dimensions."""
    words, flat = packed_items(head_dim_of(kv)), kv.flatten(2)
    first_scale = kv.shape[2] * kv.shape[3] * words
    planes = flat[..., :first_scale].view(*kv.shape[:3], 3, kv.shape[3], words // 3)
    scales = flat[0, :, first_scale:].view(torch.bfloat16).view(*kv.shape[1:4], 2)
    return planes.transpose(3, 4), scales.permute(3, 0, 1, 2)
