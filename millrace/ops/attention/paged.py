"""Attention in Triton over the paged cache: decode rows in one launch, tiles of longer rows in another.

The runner's steps provide their tiles and table rows (see `TiledRows`); for other callers they are computed from the
host's lists. With `tile_decode_rows` decode rows are tiled too: one kernel with one tiling then computes every query,
so that its result does not depend on chunking or on the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from millrace.ops.attention.decode_rule import SPLIT_CELLS, decode_tuning, takes_list
from millrace.ops.attention.long_rows import LongRow, attend_long_row
from millrace.ops.attention.rows import Rows
from millrace.ops.kv.cache import format_of, is_fp8

if TYPE_CHECKING:
    from millrace.ops.triton.attention.prefill import (
        DecodeTuning,
        PagedRows,
        PrefillTuning,
        SharedPrefix,
        SplitWorkspace,
    )

SHARED_ROWS = 1024
"""Initial capacity in rows of the shared-prefix workspace; captured graphs hold its address, so it must not move."""


@runtime_checkable
class TiledRows(Protocol):
    """Rows with precomputed tiles. A captured graph needs them, because its launches cannot change."""

    table_rows: Tensor | None
    tiles: Tensor | None
    """int32 [n, 2]: (row, first query); row -1 is padding. None if every row is a decode row."""
    has_decode_rows: bool
    """True if some rows may have exactly one query."""
    long_rows: tuple[LongRow, ...]
    """Rows without tiles, long enough for cuDNN attention; only in steps that are not captured."""
    shared_len: Tensor | None
    """int32 [1], decode steps only: length of the prefix shared by all rows."""
    decode_rows: Tensor | None
    """int32 [LIST_COLUMNS, n]: the decode rows, longest first (see decode_rule.py)."""
    context_parts: int
    """Split KV: programs that share the keys of one tile. Above 1 only if decode rows are tiled too and there
    is no window."""


@dataclass(frozen=True, slots=True)
class PreparedRows:
    rows: PagedRows
    tiles: Tensor | None
    has_decode_rows: bool
    window: int
    long_rows: tuple[LongRow, ...] = ()
    shared_len: Tensor | None = None
    decode_rows: Tensor | None = None
    context_parts: int = 1


class PagedAttention:
    """The version for CUDA devices."""

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        softcap: float | None = None,
        *,
        tile_decode_rows: bool = False,
    ) -> None:
        from millrace.ops.triton.attention.prefill import HeadShape

        self._shape = HeadShape(num_heads, num_kv_heads, head_dim, scale, softcap)
        self._workspace: SplitWorkspace | None = None
        self._shared: SharedPrefix | None = None
        self.tile_decode_rows = tile_decode_rows
        self.queries_per_tile = self._prefill_tuning(torch.bfloat16).queries_per_tile(self._shape.group)

    def prepare(self, rows: Rows, block_size: int, window: int | None) -> PreparedRows:
        from millrace.ops.triton.attention.prefill import PagedRows

        shared_len, decode_rows, context_parts = None, None, 1
        if isinstance(rows, TiledRows) and rows.table_rows is not None:
            shared_len, decode_rows, context_parts = rows.shared_len, rows.decode_rows, rows.context_parts
            table_rows, tiles, has_decode_rows, long_rows = (
                rows.table_rows,
                rows.tiles,
                rows.has_decode_rows,
                rows.long_rows,
            )
        else:
            long_rows, device = (), rows.seq_lens.device
            table_rows = torch.arange(len(rows.seq_lens_host), dtype=torch.int32, device=device)
            listed = tiles_of(rows.query_starts_host, self.queries_per_tile, self.tile_decode_rows)
            tiles = torch.tensor(listed, dtype=torch.int32).to(device, non_blocking=True) if listed else None
            starts = rows.query_starts_host
            has_decode_rows = any(end - start == 1 for start, end in zip(starts, starts[1:], strict=False))
            has_decode_rows = has_decode_rows and not self.tile_decode_rows
        paged = PagedRows(rows.query_starts, rows.seq_lens, table_rows, rows.block_tables)
        return PreparedRows(
            paged, tiles, has_decode_rows, window or 0, long_rows, shared_len, decode_rows, context_parts
        )

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
        elif prepared.has_decode_rows:
            self._attend_decode_rows(queries, kv, out, prepared)
        return out

    def _attend_tiles(self, queries: Tensor, kv: Tensor, out: Tensor, prepared: PreparedRows, tiles: Tensor) -> None:
        from millrace.ops.triton.attention import prefill as kernels

        tuning, parts = self._prefill_tuning(queries.dtype, is_fp8(kv)), prepared.context_parts
        split = kernels.ContextSplit(parts, self._split_workspace(kv.device)) if parts > 1 else None
        kernels.prefill(queries, kv, out, tiles, prepared.rows, self._shape, tuning, prepared.window, split)

    def _attend_decode_rows(self, queries: Tensor, kv: Tensor, out: Tensor, prepared: PreparedRows) -> None:
        from millrace.ops.triton.attention import prefill as kernels

        shape, num_rows = self._shape, prepared.rows.seq_lens.shape[0]
        listed = prepared.decode_rows if takes_list(num_rows * shape.num_kv_heads, format_of(kv), kv.device) else None
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
        """Attend to the shared prefix once for many rows, then to each row's own keys."""
        from millrace.ops.triton.attention import prefill as kernels

        shape, rows = self._shape, prepared.rows
        if self._shared is None or self._shared.max_rows < rows.seq_lens.shape[0]:
            max_rows = max(rows.seq_lens.shape[0], SHARED_ROWS)
            self._shared = kernels.SharedPrefix(max_rows, shape, kv.device, length)
        kernels.shared_prefix(queries, kv, rows, shape, self._shared)
        tuning = replace(self._decode_tuning(rows.seq_lens.shape[0], queries, kv), splits=1)
        workspace = self._split_workspace(kv.device)
        kernels.decode(queries, kv, out, rows, shape, workspace, tuning, all_single=True, shared=self._shared)

    def _split_workspace(self, device: torch.device) -> SplitWorkspace:
        from millrace.ops.triton.attention.prefill import SplitWorkspace

        if self._workspace is None:
            self._workspace = SplitWorkspace(SPLIT_CELLS, self._shape, device)
        return self._workspace

    def _decode_tuning(self, num_rows: int, queries: Tensor, kv: Tensor, listed: bool = False) -> DecodeTuning:
        return decode_tuning(self._shape, num_rows, queries.dtype, queries.device, format_of(kv), listed)

    def _prefill_tuning(self, dtype: torch.dtype, fp8: bool = False) -> PrefillTuning:
        """`block_m` does not depend on the dtype: the host computes tiles without knowing it."""
        from millrace.ops.triton.attention.prefill import PrefillTuning

        large = self._shape.head_dim > 128
        block_m = 64 if large else 128
        while block_m < self._shape.group:
            block_m *= 2
        if dtype == torch.float32:
            return PrefillTuning(block_m=block_m, tile=32, warps=8, stages=2)
        if fp8 and not large:  # widening dominates: use larger tiles
            return PrefillTuning(block_m=block_m, tile=128, warps=8, stages=2)
        return PrefillTuning(block_m=block_m, tile=64, warps=8, stages=2 if large else 3)


def tiles_of(query_starts: list[int], queries_per_tile: int, every_row: bool = False) -> list[tuple[int, int]]:
    """(row, first query) of each tile of the rows with more than one query, or of all rows with `every_row`. Within a
    row, tiles that see more keys come first."""
    listed = [
        (row, first)
        for row, (start, end) in enumerate(zip(query_starts, query_starts[1:], strict=False))
        if end - start > 1 or (every_row and end > start)
        for first in range(0, end - start, queries_per_tile)
    ]
    return listed[::-1]
