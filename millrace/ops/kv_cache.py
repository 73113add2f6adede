"""Writing keys and values into the paged cache, whose layers are [2, blocks, kv_heads, block_size, head_dim]."""

from __future__ import annotations

from torch import Tensor


def cache_places(slots: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """(block ids, offsets inside the block) of slots [T], both int64. The same for every layer of a step."""
    return slots // block_size, slots % block_size


def write_kv(keys_values: Tensor, kv: Tensor, block_ids: Tensor, offsets: Tensor) -> None:
    """Put keys_values [T, 2, kv_heads, head_dim] at each token's place. Places of one step are distinct,
    except in the scratch block 0, whose content is never read."""
    kv[:, block_ids, :, offsets] = keys_values
