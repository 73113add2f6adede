"""Copies tokens of a KV cache to other positions: a torch reference, which is what runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from millrace.ops.elementwise.rope import rope
from millrace.ops.kv.cache import is_four_bit, read_kv, write_kv


@dataclass(frozen=True, slots=True)
class TokenSlots:
    """Where tokens are: block and offset of each, int64 [T]."""

    blocks: Tensor
    offsets: Tensor


def slots_of(blocks: Tensor, start: int, count: int, block_size: int) -> TokenSlots:
    """Of `count` tokens in these blocks, from offset `start` of the first one on."""
    places = torch.arange(start, start + count, device=blocks.device)
    return TokenSlots(blocks[places // block_size], places % block_size)


def place_tokens(
    kv: Tensor,
    blocks: Tensor,
    start: int,
    targets: TokenSlots,
    angles: Tensor | None,
    key_shift: Tensor | None = None,
) -> None:
    """Copy keys and values to `targets` from these blocks (int64), from offset `start` of the first one on. Sources and
    targets have no slot in common. Keys are rotated by `angles` [T, rotary_dim], those of the distance; None: not at
    all. `key_shift`: as in `PrepareQkv`."""
    count, block_size = len(targets.blocks), kv.shape[3]
    sources = slots_of(torch.arange(len(blocks), device=kv.device), start, count, block_size)
    keys, values = read_kv(kv, blocks)[:, sources.blocks, :, sources.offsets].unbind(1)  # [T, kv_heads, head_dim]
    if angles is not None:
        if key_shift is not None and is_four_bit(kv):
            keys = rope(keys + key_shift, angles) - key_shift
        else:
            keys = rope(keys, angles)
    write_kv(torch.stack((keys, values), dim=1), kv, targets.blocks, targets.offsets)
