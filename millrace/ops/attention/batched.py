"""Attention with torch's scaled_dot_product_attention (SDPA), one call per group of rows with equally many queries.

Keys and values of a group are gathered per layer into [rows, kv_heads, keys, head_dim]. The query heads of a KV head
are treated as further queries, so that KV is never repeated. Long rows are split to bound the memory of the scores.
Control flow reads only host copies, never the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from millrace.ops.attention.reference import softmax
from millrace.ops.attention.rows import AttentionRows, PlainRows, plain_rows
from millrace.ops.elementwise.softcap import softcap as apply_softcap
from millrace.ops.kv.cache import CacheFormat, read_kv

MAX_SCORES = 1 << 26
"""Maximum scores per KV head in one piece; bounds the memory of masks and of the float32 path."""


@dataclass(frozen=True, slots=True)
class Group:
    """Consecutive rows with `num_queries` queries each, or a range of the queries of one row."""

    first_token: int
    num_rows: int
    num_queries: int
    block_ids: Tensor
    """int64 [rows · blocks]"""
    num_keys: int
    """Keys per row after gathering."""
    masked: Tensor | None
    """bool [rows, 1, queries · group, keys], true where a query must not see a key; None: use SDPA's causal mask."""
    stale: Tensor | None
    """bool [rows, 1, keys, 1], true for slots after the row's last key, which may hold anything, even NaN."""


class BatchedAttention:
    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, scale: float, softcap: float | None = None
    ) -> None:
        self.num_kv_heads = num_kv_heads
        self.group_size = num_heads // num_kv_heads
        self.head_dim = head_dim
        self.scale = scale
        self.softcap = softcap

    def prepare(
        self, rows: AttentionRows, block_size: int, window: int | None, cache_format: CacheFormat = "plain"
    ) -> list[Group]:
        plain = plain_rows(rows)
        return [
            self._group(plain, first_row, num_rows, skip, num_queries, block_size, window)
            for first_row, num_rows, skip, num_queries in self._pieces(plain)
        ]

    def _pieces(self, rows: PlainRows) -> Iterator[tuple[int, int, int, int]]:
        """(first row, number of rows, queries skipped at its start, queries per row), in the order of the tokens."""
        starts, lens = rows.query_starts_host, rows.seq_lens_host
        row = 0
        while row < len(lens):
            queries, longest, end = starts[row + 1] - starts[row], lens[row], row + 1
            while end < len(lens) and starts[end + 1] - starts[end] == queries:
                wider = max(longest, lens[end])
                if (end + 1 - row) * queries * self.group_size * wider > MAX_SCORES:
                    break
                longest, end = wider, end + 1
            if end - row > 1:
                yield row, end - row, 0, queries
            else:
                step = max(1, MAX_SCORES // (self.group_size * longest))
                for skip in range(0, queries, step):
                    yield row, 1, skip, min(step, queries - skip)
            row = end

    def _group(
        self, rows: PlainRows, first: int, count: int, skip: int, queries: int, block_size: int, window: int | None
    ) -> Group:
        first_token = rows.query_starts_host[first] + skip
        if not queries:
            return Group(first_token, count, 0, rows.block_tables[:0, 0].long(), 0, None, None)
        after = rows.query_starts_host[first + 1] - first_token - queries
        lens_host = [length - after for length in rows.seq_lens_host[first : first + count]]
        longest = max(lens_host)
        tables = rows.block_tables[first : first + count]
        lens = rows.seq_lens[first : first + count, None].long() - after
        if window is not None and longest <= window:
            window = None
        if window is None:
            num_keys = longest
            block_ids = tables[:, : -(-longest // block_size)].long()
            key_positions = torch.arange(num_keys, device=lens.device)[None, :]
        else:
            first_block = (lens - (queries + window - 1)).clamp_(min=0) // block_size
            width = -(-(queries + window - 1) // block_size) + 1
            columns = first_block + torch.arange(width, device=lens.device)
            block_ids = tables.long().gather(1, columns.clamp(max=tables.shape[1] - 1))
            num_keys = width * block_size
            key_positions = first_block * block_size + torch.arange(num_keys, device=lens.device)
        is_exact = count == 1 and window is None
        if is_exact and queries == longest and self.softcap is None:
            return Group(first_token, 1, queries, block_ids.flatten(), num_keys, None, None)
        masked = self._mask(lens, key_positions, queries, window)
        stale = None if is_exact else (key_positions >= lens)[:, None, :, None]
        return Group(first_token, count, queries, block_ids.flatten(), num_keys, masked, stale)

    def _mask(self, lens: Tensor, key_positions: Tensor, queries: int, window: int | None) -> Tensor:
        query_positions = lens[:, :, None] - queries + torch.arange(queries, device=lens.device)[:, None]
        keys = key_positions[:, None, :]
        masked = keys > query_positions
        if window is not None:
            masked = masked | (query_positions - keys >= window)
        return masked.repeat_interleave(self.group_size, dim=1)[:, None]

    def __call__(self, queries: Tensor, kv: Tensor, prepared: list[Group], sinks: Tensor | None = None) -> Tensor:
        if len(prepared) == 1:
            return self._attend(queries, kv, prepared[0], sinks).flatten(1)
        output = torch.empty_like(queries, memory_format=torch.contiguous_format)
        for group in prepared:
            tokens = slice(group.first_token, group.first_token + group.num_rows * group.num_queries)
            output[tokens] = self._attend(queries[tokens], kv, group, sinks)
        return output.flatten(1)

    def _attend(self, queries: Tensor, kv: Tensor, group: Group, sinks: Tensor | None) -> Tensor:
        if not group.num_queries:
            return queries
        keys, values = (self._lay_out(blocks, group) for blocks in self._gather(kv, group, queries.dtype))
        masked = group.masked
        if masked is None and sinks is not None:
            masked = self._causal(group.num_queries, queries.device)
        if masked is None:
            by_head = queries.transpose(0, 1)[None]
            heads = F.scaled_dot_product_attention(
                by_head, keys, values, is_causal=True, scale=self.scale, enable_gqa=self.group_size > 1
            )
            return heads[0].transpose(0, 1)
        packed = self._pack(queries, group)
        if self.softcap is None and sinks is None:
            attended = F.scaled_dot_product_attention(packed, keys, values, attn_mask=~masked, scale=self.scale)
        else:
            attended = self._explicit(packed, keys, values, masked, sinks)
        return self._unpack(attended, group)

    def _gather(self, kv: Tensor, group: Group, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Blocks of keys and of values, each [n, kv_heads, block_size, head_dim]."""
        if kv.dtype != dtype:
            keys, values = read_kv(kv, group.block_ids).to(dtype)
            return keys, values
        # Indexing a transposed view would make torch copy the whole cache first.
        return kv[0].index_select(0, group.block_ids), kv[1].index_select(0, group.block_ids)

    def _lay_out(self, blocks: Tensor, group: Group) -> Tensor:
        """[rows, kv_heads, keys, head_dim], zero in stale slots: a masked NaN would still spread."""
        rows = blocks.view(group.num_rows, -1, *blocks.shape[1:])
        found = rows.transpose(1, 2).flatten(2, 3)[:, :, : group.num_keys]
        return found if group.stale is None else found.masked_fill(group.stale, 0)

    def _pack(self, queries: Tensor, group: Group) -> Tensor:
        shape = (group.num_rows, group.num_queries, self.num_kv_heads, self.group_size, self.head_dim)
        return queries.reshape(shape).transpose(1, 2).flatten(2, 3)

    def _unpack(self, attended: Tensor, group: Group) -> Tensor:
        shape = (group.num_rows, self.num_kv_heads, group.num_queries, self.group_size, self.head_dim)
        return attended.view(shape).transpose(1, 2).flatten(2, 3).flatten(0, 1)

    def _causal(self, queries: int, device: torch.device) -> Tensor:
        """The mask of a row without context."""
        hidden = torch.ones((queries, queries), dtype=torch.bool, device=device).triu(1)
        return hidden.repeat_interleave(self.group_size, dim=0)[None, None]

    def _explicit(self, queries: Tensor, keys: Tensor, values: Tensor, masked: Tensor, sinks: Tensor | None) -> Tensor:
        """With a soft cap or sinks, which SDPA does not have."""
        scores = torch.matmul(queries.float(), keys.float().transpose(-1, -2)).mul_(self.scale)
        if self.softcap is not None:
            scores = apply_softcap(scores, self.softcap)
        own = None if sinks is None else sinks.view(self.num_kv_heads, self.group_size)
        own = None if own is None else own.repeat(1, queries.shape[2] // self.group_size)
        weights = softmax(scores.masked_fill_(masked, float("-inf")), own)
        return torch.matmul(weights, values.float()).to(queries.dtype).contiguous()
