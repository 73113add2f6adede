"""Attention in Triton over the paged cache: rows with one query in one launch, tiles of longer rows in another.

A step that is captured in a graph brings its own tiles and table rows (see `Tiled`); any other step's are made from
the host's lists. `everything_tiled` sends single queries through the tiles too: then one kernel with one tiling
computes every query, and its result cannot depend on how a sequence was cut into steps or on what ran beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from millrace.ops.attention.decode_rule import decode_tuning, takes_list
from millrace.ops.attention.long_rows import LongRow, attend_long_row
from millrace.ops.attention.rows import Rows
from millrace.ops.kv.cache import format_of, holds_fp8

if TYPE_CHECKING:
    from millrace.ops.triton.attention.prompt import (
        DecodeTuning,
        PagedRows,
        PrefillTuning,
        SharedPrefix,
        SplitWorkspace,
    )

SPLIT_CELLS = 2048
"""Splits of all rows and KV heads together that the workspace has room for. One round of tiles needs less."""
SHARED_ROWS = 1024
"""Rows that the workspace of shared prefixes has room for from the start: it must not move under captured steps."""


@runtime_checkable
class Tiled(Protocol):
    """Rows that come with their tiles: what a captured step needs, since its launches cannot change in number."""

    table_rows: Tensor | None
    tiles: Tensor | None
    """int32 [n, 2]: (row, first query), a row of -1 for none; no tiles at all where every row has one query."""
    has_singles: bool
    """Whether some rows may have exactly one query."""
    long_rows: tuple[LongRow, ...]
    """Rows that have no tiles and are long enough for the library's attention; only in steps that are not captured."""
    shared_len: Tensor | None
    """int32 [1] in steps of single queries whose rows all begin with the same blocks: how many tokens those hold."""
    singles: Tensor | None
    """int32 [6, n]: the rows with one query, the longest first, as `attention_decode.LIST_COLUMNS` says."""
    context_parts: int
    """Programs that share the keys of one tile. More than one only where every query is tiled, and without windows."""


@dataclass(frozen=True, slots=True)
class PreparedRows:
    rows: PagedRows
    tiles: Tensor | None
    has_singles: bool
    window: int
    long_rows: tuple[LongRow, ...] = ()
    shared_len: Tensor | None = None
    singles: Tensor | None = None
    context_parts: int = 1


class PagedAttention:
    """make(num_heads, num_kv_heads, head_dim, scale, softcap): see the package."""

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        softcap: float | None = None,
        *,
        everything_tiled: bool = False,
    ) -> None:
        from millrace.ops.triton.attention.prompt import HeadShape

        self._shape = HeadShape(num_heads, num_kv_heads, head_dim, scale, softcap)
        self._workspace: SplitWorkspace | None = None
        self._shared: SharedPrefix | None = None
        self.everything_tiled = everything_tiled
        self.queries_per_tile = self._prefill_tuning(torch.bfloat16).queries_per_tile(self._shape.group)

    def prepare(self, rows: Rows, block_size: int, window: int | None) -> PreparedRows:
        from millrace.ops.triton.attention.prompt import PagedRows

        shared_len, singles, context_parts = None, None, 1
        if isinstance(rows, Tiled) and rows.table_rows is not None:
            shared_len, singles, context_parts = rows.shared_len, rows.singles, rows.context_parts
            table_rows, tiles, has_singles, long_rows = rows.table_rows, rows.tiles, rows.has_singles, rows.long_rows
        else:
            long_rows, device = (), rows.seq_lens.device
            table_rows = torch.arange(len(rows.seq_lens_host), dtype=torch.int32, device=device)
            listed = tiles_of(rows.query_starts_host, self.queries_per_tile, self.everything_tiled)
            tiles = torch.tensor(listed, dtype=torch.int32).to(device, non_blocking=True) if listed else None
            starts = rows.query_starts_host
            has_singles = any(end - start == 1 for start, end in zip(starts, starts[1:], strict=False))
            has_singles = has_singles and not self.everything_tiled
        paged = PagedRows(rows.query_starts, rows.seq_lens, table_rows, rows.block_tables)
        return PreparedRows(paged, tiles, has_singles, window or 0, long_rows, shared_len, singles, context_parts)

    def __call__(self, queries: Tensor, kv: Tensor, prepared: PreparedRows) -> Tensor:
        shape, long_rows = self._shape, prepared.long_rows
        if len(long_rows) == 1 and long_rows[0].num_queries == queries.shape[0]:
            return attend_long_row(queries, kv, prepared.rows, long_rows[0], shape)
        out = torch.empty((queries.shape[0], shape.num_heads * shape.head_dim), dtype=queries.dtype, device=kv.device)
        for row in long_rows:
            tokens = slice(row.first_token, row.first_token + row.num_queries)
            out[tokens] = attend_long_row(queries, kv, prepared.rows, row, shape)
        if prepared.tiles is not None:
            self._attend_tiles(queries, kv, out, prepared, prepared.tiles)
        if prepared.shared_len is not None:
            self._attend_shared(queries, kv, out, prepared, prepared.shared_len)
        elif prepared.has_singles:
            self._attend_singles(queries, kv, out, prepared)
        return out

    def _attend_tiles(self, queries: Tensor, kv: Tensor, out: Tensor, prepared: PreparedRows, tiles: Tensor) -> None:
        from millrace.ops.triton.attention import prompt as kernels

        tuning, parts = self._prefill_tuning(queries.dtype, holds_fp8(kv)), prepared.context_parts
        split = kernels.ContextSplit(parts, self._split_workspace(kv.device)) if parts > 1 else None
        kernels.prefill(queries, kv, out, tiles, prepared.rows, self._shape, tuning, prepared.window, split)

    def _attend_singles(self, queries: Tensor, kv: Tensor, out: Tensor, prepared: PreparedRows) -> None:
        from millrace.ops.triton.attention import prompt as kernels

        shape, num_rows = self._shape, prepared.rows.seq_lens.shape[0]
        listed = prepared.singles if takes_list(num_rows * shape.num_kv_heads, format_of(kv)) else None
        kernels.decode(
            queries,
            kv,
            out,
            prepared.rows,
            shape,
            self._split_workspace(kv.device),
            self._decode_tuning(num_rows, queries, kv, listed is not None),
            prepared.window,
            all_single=prepared.tiles is None and not prepared.long_rows,
            listed=listed,
        )

    def _attend_shared(self, queries: Tensor, kv: Tensor, out: Tensor, prepared: PreparedRows, length: Tensor) -> None:
        """The keys that all rows share once for many rows, then each row's own."""
        from millrace.ops.triton.attention import prompt as kernels

        shape, rows = self._shape, prepared.rows
        if self._shared is None or self._shared.most_rows < rows.seq_lens.shape[0]:
            most = max(rows.seq_lens.shape[0], SHARED_ROWS)
            self._shared = kernels.SharedPrefix(most, shape, kv.device, length)
        kernels.shared_prefix(queries, kv, rows, shape, self._shared)
        tuning = replace(self._decode_tuning(rows.seq_lens.shape[0], queries, kv), splits=1)
        workspace = self._split_workspace(kv.device)
        kernels.decode(queries, kv, out, rows, shape, workspace, tuning, all_single=True, shared=self._shared)

    def _split_workspace(self, device: torch.device) -> SplitWorkspace:
        from millrace.ops.triton.attention.prompt import SplitWorkspace

        if self._workspace is None:
            self._workspace = SplitWorkspace(SPLIT_CELLS, self._shape, device)
        return self._workspace

    def _decode_tuning(self, num_rows: int, queries: Tensor, kv: Tensor, listed: bool = False) -> DecodeTuning:
        return decode_tuning(self._shape, num_rows, queries.dtype, queries.device, format_of(kv), listed)

    def _prefill_tuning(self, dtype: torch.dtype, fp8: bool = False) -> PrefillTuning:
        """`block_m` is the same for every dtype: the host cuts rows into tiles without asking for it."""
        from millrace.ops.triton.attention.prompt import PrefillTuning

        large = self._shape.head_dim > 128
        least = 64 if large else 128
        while least < self._shape.group:
            least *= 2
        if dtype == torch.float32:
            return PrefillTuning(block_m=least, tile=32, warps=8, stages=2)
        if fp8 and not large:  # widening is the larger part of the work: fewer, larger pieces
            return PrefillTuning(block_m=least, tile=128, warps=8, stages=2)
        return PrefillTuning(block_m=least, tile=64, warps=8, stages=2 if large else 3)


def tiles_of(query_starts: list[int], queries_per_tile: int, every_row: bool = False) -> list[tuple[int, int]]:
    """(row, first query of the tile) for every row with more than one query; with `every_row` for all. Tiles that see
    more keys come before the others of their row."""
    listed = [
        (row, first)
        for row, (start, end) in enumerate(zip(query_starts, query_starts[1:], strict=False))
        if end - start > 1 or (every_row and end > start)
        for first in range(0, end - start, queries_per_tile)
    ]
    return listed[::-1]
