"""Copies tokens of a KV cache to other positions: a torch reference, which is what runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from millrace.ops.elementwise.rope import rope
from millrace.ops.kv.cache import read_kv, write_kv


@dataclass(frozen=True, slots=True)
class TokenSlots:
    """Where tokens are: block and offset of each, int64 [T]."""

    blocks: Tensor
    offsets: Tensor


def slots_of(blocks: Tensor, start: int, count: int, block_size: int) -> TokenSlots:
    """Of `count` tokens in these blocks (int64), from offset `start` of the first one on."""
    places = torch.arange(start, start + count, device=blocks.device)
    return TokenSlots(blocks[places // block_size], places % block_size)


def place_tokens(kv: Tensor, sources: TokenSlots, targets: TokenSlots, angles: Tensor | None) -> None:
    """Copy keys and values from `sources` to `targets`, which have no slot in common. Keys are rotated by `angles`
    [T, rotary_dim], those of the distance; None: not at all."""
    blocks, index = torch.unique_consecutive(sources.blocks, return_inverse=True)
    read = read_kv(kv, blocks)[:, index, :, sources.offsets]  # [T, 2, kv_heads, head_dim]
    keys, values = read.unbind(1)
    if angles is not None:
        keys = rope(keys, angles)
    write_kv(torch.stack((keys, values), dim=1), kv, targets.blocks, targets.offsets)
