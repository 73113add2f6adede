"""Latent attention over the paged cache: every head reads the same vector of a token, as its key and, but for the part
that is rotated, as its value.

make(num_heads, rank, rope_dim, scale) -> Attention. Queries are [T, heads, rank + rope_dim], mapped to latents; the
cache of a layer is [1, blocks, 1, block_size, rank + rope_dim]; the result is [T, heads · rank]. There are no sinks.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from millrace.ops.attention.native import PreparedNative, prepare_native
from millrace.ops.attention.paged import PagedAttention, PreparedRows
from millrace.ops.attention.reference import PreparedReference
from millrace.ops.attention.rows import AttentionRows, plain_rows
from millrace.ops.base.version import Version
from millrace.ops.cpp.native import DTYPES, KV_DTYPES, native, native_missing
from millrace.ops.kv.cache import CacheFormat, read_kv
from millrace.ops.triton import triton_missing
from millrace.ops.tuning.load import num_multiprocessors

if TYPE_CHECKING:
    from millrace.ops.triton.attention.decode import SplitWorkspace


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


class NativeLatentAttention:
    """In C++ (cpp/attention/latent.cpp): one pass over the paged cache."""

    def __init__(self, num_heads: int, rank: int, rope_dim: int, scale: float) -> None:
        self._attention = native().without_gil.latent_attention
        self._sizes, self._scale = (num_heads, rank, rank + rope_dim), scale

    def prepare(
        self, rows: AttentionRows, block_size: int, window: int | None, cache_format: CacheFormat = "plain"
    ) -> PreparedNative:
        assert window is None
        return prepare_native(rows, None)

    def __call__(self, queries: Tensor, kv: Tensor, prepared: PreparedNative, sinks: Tensor | None = None) -> Tensor:
        assert sinks is None
        heads, rank, width = self._sizes
        queries = queries.contiguous()
        out = torch.empty((queries.shape[0], heads * rank), dtype=queries.dtype)
        self._attention(
            DTYPES[queries.dtype],
            KV_DTYPES[kv.dtype],
            queries.data_ptr(),
            kv.data_ptr(),
            out.data_ptr(),
            *prepared.addresses,
            prepared.num_rows,
            prepared.table_width,
            heads,
            rank,
            width,
            kv.shape[3],
            self._scale,
        )
        return out


class PagedLatentAttention(PagedAttention):
    """The version for CUDA devices. All rows are tiled, those that decode too."""

    def __init__(self, num_heads: int, rank: int, rope_dim: int, scale: float, *, is_fixed: bool = False) -> None:
        from millrace.ops.triton.attention.latent import LatentShape

        super().__init__(num_heads, 1, rank + rope_dim, scale, tile_decode_rows=True)
        self._latent = LatentShape(num_heads, rank, rope_dim, scale)
        self._is_fixed = is_fixed
        self._parts: SplitWorkspace | None = None
        self.queries_per_tile = self._latent.queries_per_tile

    def __call__(self, queries: Tensor, kv: Tensor, prepared: PreparedRows, sinks: Tensor | None = None) -> Tensor:
        from millrace.ops.triton.attention.context_split import ContextSplit
        from millrace.ops.triton.attention.latent import attend_latents

        shape, tiles = self._latent, prepared.step.tiles
        assert sinks is None
        out = torch.empty((queries.shape[0], shape.num_heads * shape.rank), dtype=queries.dtype, device=kv.device)
        if tiles is None:
            return out
        programs = num_multiprocessors(kv.device)
        parts, split = 1 if self._is_fixed else shape.parts(tiles.shape[0], programs), None
        if parts > 1:
            if self._parts is None:
                self._parts = shape.workspace(programs, kv.device)
            split = ContextSplit(parts, self._parts)
        attend_latents(queries, kv, out, tiles, prepared.rows, shape, split)
        return out


VERSIONS = (
    Version(
        op="latent_attention",
        name="native",
        make=NativeLatentAttention,
        when="C++: one pass over the paged latents, each query summed over the same tiles whatever the batch",
        devices=("cpu",),
        dtypes=tuple(DTYPES),
        invariant_on=("cpu",),
        missing=native_missing,
    ),
    Version(
        op="latent_attention",
        name="paged",
        make=PagedLatentAttention,
        when="Triton: one pass over the latents, each read once for up to 64 query vectors; few tiles share keys",
        devices=("cuda",),
        missing=triton_missing,
    ),
    Version(
        op="latent_attention",
        name="paged_fixed",
        make=partial(PagedLatentAttention, is_fixed=True),
        when="Triton: as paged, with one program for all keys, so that sums never depend on the batch",
        devices=("cuda",),
        invariant_on=("cuda",),
        missing=triton_missing,
    ),
    Version(
        op="latent_attention",
        name="reference",
        make=ReferenceLatentAttention,
        when="the reference: one query after the other in float32",
        invariant_on=("cpu",),
    ),
)
