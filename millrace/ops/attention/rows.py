"""The interface of attention: ragged rows of queries over a paged cache.

The queries of row i are the step's tokens query_starts[i] : query_starts[i + 1], which are the last of its seq_lens[i]
tokens. When attention runs, the cache already holds the keys and values of all these tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

from torch import Tensor

from millrace.ops.attention.long_rows import LongRow
from millrace.ops.kv.cache import CacheFormat


@dataclass(frozen=True, slots=True)
class _Rows:
    query_starts: Tensor
    """int32 [n + 1]"""
    seq_lens: Tensor
    """int32 [n]: tokens of the row in the cache after this step has written its own."""
    block_tables: Tensor
    """int32 [groups, n, W], one table per KV group, or that of a single group [n, W], as `Attention.prepare` takes it;
    0, the scratch block, after a row's last block."""

    def of_group(self, group: int) -> Self:
        return replace(self, block_tables=self.block_tables[group])


@dataclass(frozen=True, slots=True)
class PlainRows(_Rows):
    """Rows whose lengths the host knows, so that no device tensor is read on the host. Row i has table row i."""

    query_starts_host: list[int]
    seq_lens_host: list[int]


@dataclass(frozen=True, slots=True)
class TiledRows(_Rows):
    """Rows with precomputed tiles, whose lengths are known only on the device. A captured graph needs them, because its
    launches cannot change. Only paged attention takes them."""

    table_rows: Tensor
    """int32 [n]: the row of `block_tables` that each row reads; the tables are those of all rows."""
    tiles: Tensor | None = None
    """int32 [tiles, 2]: (row, first query); row -1 is padding. None if every row is a decode row."""
    has_decode_rows: bool = True
    """True if some rows may have exactly `queries_per_row` queries and no tiles."""
    long_rows: tuple[LongRow, ...] = ()
    """Rows without tiles, long enough for cuDNN attention. Layers with a window tile them."""
    shared_len: Tensor | None = None
    """int32 [1], decode steps only: length of the prefix shared by all rows. Layers with a window do not use it."""
    decode_rows: Tensor | None = None
    """int32 [LIST_COLUMNS, n]: the decode rows, longest first (see decode_rule.py)."""
    context_parts: int = 1
    """Split KV: programs that share the keys of one tile, in layers without a window. Above 1 only if decode rows are
    tiled too."""
    queries_per_row: int = 1
    """Queries of a decode row. Above 1, all rows without tiles are decode rows."""


AttentionRows = PlainRows | TiledRows


def plain_rows(rows: AttentionRows) -> PlainRows:
    if not isinstance(rows, PlainRows):
        raise TypeError("only paged attention takes rows whose lengths the host does not know")
    return rows


class Attention(Protocol):
    """Causal attention. A query at position p sees keys k <= p, and with a window only those with p - k < window."""

    def prepare(
        self, rows: AttentionRows, block_size: int, window: int | None, cache_format: CacheFormat = "plain"
    ) -> Any:
        """Compute once per step what all layers with this window share. On a GPU at least one other kernel must run
        before attention: attention reads some of it before the kernel before it has ended. The format of the cache
        decides how rows are split, which any format could be."""
        ...

    def __call__(self, queries: Tensor, kv: Tensor, prepared: Any, sinks: Tensor | None = None) -> Tensor:
        """queries [T, heads, head_dim], kv: one layer of the cache (ops/kv/cache.py) -> [T, heads · head_dim]

        `sinks`, float32 [heads]: the score of a further key of each head, whose value is zero: it only takes its share
        of the softmax. Its score is neither scaled nor soft-capped.

        On a GPU, queries are a view of the QKV projection: prefill reads this step's keys and values from the same
        buffer."""
        ...
