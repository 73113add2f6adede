"""Attention in C++ (cpp/attention/attention.cpp): one pass over the paged cache, without gathering it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from millrace.ops.attention.rows import AttentionRows, plain_rows
from millrace.ops.cpp.native import DTYPES, KV_DTYPES, native
from millrace.ops.kv.cache import CacheFormat

MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class PreparedNative:
    """`tensors` keeps the memory of `addresses` alive."""

    tensors: tuple[Tensor, Tensor, Tensor]
    addresses: tuple[int, int, int]
    num_rows: int
    table_width: int
    window: int
    """0 for none."""


def prepare_native(rows: AttentionRows, window: int | None) -> PreparedNative:
    rows = plain_rows(rows)
    tensors = (rows.query_starts.contiguous(), rows.seq_lens.contiguous(), rows.block_tables.contiguous())
    addresses = (tensors[0].data_ptr(), tensors[1].data_ptr(), tensors[2].data_ptr())
    return PreparedNative(tensors, addresses, tensors[1].shape[0], tensors[2].shape[1], window or 0)


class NativeAttention:
    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, scale: float, softcap: float | None = None
    ) -> None:
        self._attention = native().without_gil.attention
        self._sizes = (num_heads, num_kv_heads, head_dim)
        self._scale = scale
        self._softcap = softcap or 0.0

    def prepare(
        self, rows: AttentionRows, block_size: int, window: int | None, cache_format: CacheFormat = "plain"
    ) -> PreparedNative:
        return prepare_native(rows, window)

    def __call__(self, queries: Tensor, kv: Tensor, prepared: PreparedNative, sinks: Tensor | None = None) -> Tensor:
        heads, kv_heads, head_dim = self._sizes
        tokens = queries.shape[0]
        out = torch.empty((tokens, heads * head_dim), dtype=queries.dtype)
        self._attention(
            DTYPES[queries.dtype],
            KV_DTYPES[kv.dtype],
            queries.data_ptr(),
            queries.stride(0),
            kv.data_ptr(),
            out.data_ptr(),
            *prepared.addresses,
            prepared.num_rows,
            prepared.table_width,
            heads,
            kv_heads,
            head_dim,
            kv.shape[1],
            kv.shape[3],
            prepared.window,
            self._scale,
            self._softcap,
            None if sinks is None else sinks.data_ptr(),
        )
        return out
