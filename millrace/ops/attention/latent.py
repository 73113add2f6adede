"""Latent attention over the paged cache: every head reads the same vector of a token, as its key and, but for the part
that is rotated, as its value.

make(num_heads, rank, rope_dim, scale) -> Attention. Queries are [T, heads, rank + rope_dim], mapped to latents; the
cache of a layer is [1, blocks, 1, block_size, rank + rope_dim]; the result is [T, heads · rank]. There are no sinks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from millrace.ops.attention.reference import PreparedReference
from millrace.ops.attention.rows import AttentionRows, plain_rows
from millrace.ops.base.version import Version
from millrace.ops.kv.cache import CacheFormat, read_kv


class ReferenceLatentAttention:
    """The reference: one query after the other in float32. The sums of a query depend on its context alone."""

    def __init__(self, num_heads: int, rank: int, rope_dim: int, scale: float) -> None:
        self._rank, self._scale = rank, scale

    def prepare(
        self, rows: AttentionRows, block_size: int, window: int | None, cache_format: CacheFormat = "plain"
    ) -> PreparedReference:
        return PreparedReference(plain_rows(rows), block_size, window)

    def __call__(self, queries: Tensor, kv: Tensor, prepared: PreparedReference, sinks: Tensor | None = None) -> Tensor:
        assert sinks is None
        rows = prepared.rows
        out = queries.new_empty((queries.shape[0], queries.shape[1], self._rank))
        for row, seq_len in enumerate(rows.seq_lens_host):
            start, end = rows.query_starts_host[row : row + 2]
            block_ids = rows.block_tables[row, : -(-seq_len // prepared.block_size)].long()
            latents = read_kv(kv, block_ids)[0, :, 0].flatten(0, 1)
            for token in range(start, end):
                out[token] = self._one_query(queries[token], latents[: seq_len - end + token + 1])
        return out.flatten(1)

    def _one_query(self, heads: Tensor, latents: Tensor) -> Tensor:
        weights = torch.softmax((heads.float() * self._scale) @ latents.T, dim=-1)
        return weights @ latents[:, : self._rank]


VERSIONS = (
    Version(
        op="latent_attention",
        name="reference",
        make=ReferenceLatentAttention,
        when="the reference: one query after the other in float32",
        invariant_on=("cpu",),
    ),
)
