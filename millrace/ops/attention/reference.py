"""The reference for attention: gathers the blocks of one row at a time and computes in float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from millrace.ops.attention.rows import AttentionRows, PlainRows, plain_rows
from millrace.ops.elementwise.softcap import softcap as apply_softcap
from millrace.ops.kv.cache import CacheFormat, read_kv


@dataclass(frozen=True, slots=True)
class PreparedReference:
    rows: PlainRows
    block_size: int
    window: int | None


class ReferenceAttention:
    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, scale: float, softcap: float | None = None
    ) -> None:
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = scale
        self.softcap = softcap

    def prepare(
        self, rows: AttentionRows, block_size: int, window: int | None, cache_format: CacheFormat = "plain"
    ) -> PreparedReference:
        return PreparedReference(plain_rows(rows), block_size, window)

    def __call__(self, queries: Tensor, kv: Tensor, prepared: PreparedReference, sinks: Tensor | None = None) -> Tensor:
        rows = prepared.rows
        output = torch.empty_like(queries, memory_format=torch.contiguous_format)
        for row, seq_len in enumerate(rows.seq_lens_host):
            start, end = rows.query_starts_host[row : row + 2]
            num_blocks = -(-seq_len // prepared.block_size)
            keys, values = self._gather(kv, rows.block_tables[row, :num_blocks].long(), seq_len)
            output[start:end] = self._one_row(queries[start:end], keys, values, prepared.window, sinks)
        return output.flatten(1)

    def _gather(self, kv: Tensor, block_ids: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
        """Keys and values, float32 [heads, seq_len, head_dim]; each KV head is repeated for its query heads."""
        blocks = read_kv(kv, block_ids).permute(0, 2, 1, 3, 4).flatten(2, 3)[:, :, :seq_len]
        keys, values = blocks.repeat_interleave(self.num_heads // self.num_kv_heads, dim=1)
        return keys, values

    def _one_row(
        self, queries: Tensor, keys: Tensor, values: Tensor, window: int | None, sinks: Tensor | None
    ) -> Tensor:
        scores = torch.einsum("qhd,hkd->hqk", queries.float(), keys) * self.scale
        if self.softcap is not None:
            scores = apply_softcap(scores, self.softcap)
        num_queries, seq_len = scores.shape[1:]
        key_positions = torch.arange(seq_len, device=scores.device)
        query_positions = key_positions[seq_len - num_queries :, None]
        hidden = key_positions > query_positions
        if window is not None:
            hidden |= query_positions - key_positions >= window
        weights = softmax(scores.masked_fill(hidden, float("-inf")), None if sinks is None else sinks[:, None])
        return torch.einsum("hqk,hkd->qhd", weights, values).to(queries.dtype)


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Of float32 scores, over the last dimension. `sinks` [..., heads, queries or 1]: one more score each."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    both = torch.cat([scores, sinks[..., None].expand(*scores.shape[:-1], 1)], dim=-1)
    return torch.softmax(both, dim=-1)[..., :-1]
