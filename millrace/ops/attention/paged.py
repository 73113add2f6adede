"""Attention in Triton over the paged cache: decode rows in one launch, tiles of longer rows in another.

GPU steps provide their tiles and table rows (`TiledRows`); for plain rows they are computed from the host's lists. With
`tile_decode_rows` decode rows are tiled too: one kernel with one tiling then computes every query, so that its result
does not depend on chunking or on the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from millrace.ops.attention.decode_rule import SPLIT_CELLS, decode_tuning, few_rows, takes_list
from millrace.ops.attention.long_rows import attend_long_row
from millrace.ops.attention.rows import AttentionRows, PlainRows, TiledRows
from millrace.ops.kv.cache import CacheFormat, format_of, is_fp8

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


@dataclass(frozen=True, slots=True)
class PreparedRows:
    rows: PagedRows
    step: TiledRows
    window: int
    """0 for none."""
    in_parts: bool
    """True if `step.decode_rows` lists all decode rows in parts of equal size."""


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
        from millrace.ops.triton.attention.prefill import AttentionShape

        self._shape = AttentionShape(num_heads, num_kv_heads, head_dim, scale, softcap)
        self._workspace: SplitWorkspace | None = None
        self._shared: SharedPrefix | None = None
        self.tile_decode_rows = tile_decode_rows
        self.queries_per_tile = self._prefill_tuning(torch.bfloat16).queries_per_tile(self._shape.group)

    def prepare(
        self, rows: AttentionRows, block_size: int, window: int | None, cache_format: CacheFormat = "plain"
    ) -> PreparedRows:
        from millrace.ops.triton.attention.prefill import PagedRows
        from millrace.ops.triton.attention.row_parts import list_rows

        step = self._tiled(rows) if isinstance(rows, PlainRows) else rows
        if window is not None:
            step = self._windowed(step)
        paged = PagedRows(step.query_starts, step.seq_lens, step.table_rows, step.block_tables)
        few, num_rows, queries_per_row = None, step.seq_lens.shape[0], step.queries_per_row
        if step.has_decode_rows and step.shared_len is None:
            few = few_rows(self._shape, num_rows, step.seq_lens.device, cache_format, queries_per_row)
        if few is not None:
            listed = list_rows(paged, few.entries, window or 0, queries_per_row=queries_per_row)
            step = replace(step, decode_rows=listed)
        return PreparedRows(paged, step, window or 0, few is not None)

    def _tiled(self, rows: PlainRows) -> TiledRows:
        device, starts = rows.seq_lens.device, rows.query_starts_host
        tiles = tiles_of(starts, self.queries_per_tile, self.tile_decode_rows)
        has_single = any(end - start == 1 for start, end in zip(starts, starts[1:], strict=False))
        return TiledRows(
            rows.query_starts,
            rows.seq_lens,
            rows.block_tables,
            table_rows=torch.arange(len(rows.seq_lens_host), dtype=torch.int32, device=device),
            tiles=torch.tensor(tiles, dtype=torch.int32).to(device, non_blocking=True) if tiles else None,
            has_decode_rows=has_single and not self.tile_decode_rows,
        )

    def _windowed(self, step: TiledRows) -> TiledRows:
        """The same rows as layers with a window take them: the keys of a tile are few and not split, a shared prefix is
        out of sight, and long rows are tiled."""
        tiles = [] if step.tiles is None else [step.tiles]
        for row in step.long_rows:  # made on the device, since such steps are captured too
            count, per_tile = row.num_queries, self.queries_per_tile
            first = torch.arange(0, count, per_tile, dtype=torch.int32, device=step.seq_lens.device).flip(0)
            tiles.insert(0, torch.stack((torch.full_like(first, row.row), first), dim=1))
        listed = torch.cat(tiles) if tiles else None
        return replace(step, tiles=listed, long_rows=(), shared_len=None, context_parts=1)

    def __call__(self, queries: Tensor, kv: Tensor, prepared: PreparedRows, sinks: Tensor | None = None) -> Tensor:
        shape, long_rows = self._shape, prepared.step.long_rows
        if len(long_rows) == 1 and long_rows[0].num_queries == queries.shape[0]:
            return attend_long_row(queries, kv, prepared.rows, long_rows[0], shape, sinks)
        out = torch.empty((queries.shape[0], shape.num_heads * shape.head_dim), dtype=queries.dtype, device=kv.device)
        for row in long_rows:
            tokens = slice(row.first_token, row.first_token + row.num_queries)
            out[tokens] = attend_long_row(queries, kv, prepared.rows, row, shape, sinks)
        if prepared.step.tiles is not None:
            self._attend_tiles(queries, kv, out, prepared, prepared.step.tiles, sinks)
        if prepared.step.shared_len is not None:
            self._attend_shared(queries, kv, out, prepared, prepared.step.shared_len, sinks)
        elif prepared.step.has_decode_rows:
            self._attend_decode_rows(queries, kv, out, prepared, sinks)
        return out

    def _attend_tiles(
        self, queries: Tensor, kv: Tensor, out: Tensor, prepared: PreparedRows, tiles: Tensor, sinks: Tensor | None
    ) -> None:
        from millrace.ops.triton.attention import prefill as kernels

        tuning, parts = self._prefill_tuning(queries.dtype, is_fp8(kv)), prepared.step.context_parts
        split = kernels.ContextSplit(parts, self.split_workspace(kv.device)) if parts > 1 else None
        kernels.prefill(queries, kv, out, tiles, prepared.rows, self._shape, tuning, prepared.window, split, sinks)

    def _attend_decode_rows(
        self, queries: Tensor, kv: Tensor, out: Tensor, prepared: PreparedRows, sinks: Tensor | None
    ) -> None:
        from millrace.ops.triton.attention import prefill as kernels

        shape, num_rows = self._shape, prepared.rows.seq_lens.shape[0]
        queries_per_row, listed = prepared.step.queries_per_row, prepared.step.decode_rows
        if not prepared.in_parts and not takes_list(num_rows * shape.num_kv_heads, format_of(kv), kv.device):
            listed = None
        kernels.decode(
            queries,
            kv,
            out,
            prepared.rows,
            shape,
            self.split_workspace(kv.device),
            self._decode_tuning(num_rows, queries, kv, listed, queries_per_row),
            prepared.window,
            all_single=prepared.step.tiles is None and not prepared.step.long_rows,
            listed=listed,
            queries_per_row=queries_per_row,
            sinks=sinks,
        )

    def _attend_shared(
        self, queries: Tensor, kv: Tensor, out: Tensor, prepared: PreparedRows, length: Tensor, sinks: Tensor | None
    ) -> None:
        """Attend to the shared prefix once for many rows, then to each row's own keys."""
        from millrace.ops.triton.attention import prefill as kernels

        shape, rows = self._shape, prepared.rows
        if self._shared is None or self._shared.max_rows < rows.seq_lens.shape[0]:
            max_rows = max(rows.seq_lens.shape[0], SHARED_ROWS)
            self._shared = kernels.SharedPrefix(max_rows, shape, kv.device, length)
        kernels.shared_prefix(queries, kv, rows, shape, self._shared)
        tuning = replace(self._decode_tuning(rows.seq_lens.shape[0], queries, kv), splits=1)
        workspace = self.split_workspace(kv.device)
        kernels.decode(
            queries, kv, out, rows, shape, workspace, tuning, all_single=True, shared=self._shared, sinks=sinks
        )

    def split_workspace(self, device: torch.device) -> SplitWorkspace:
        from millrace.ops.triton.attention.prefill import SplitWorkspace

        if self._workspace is None:
            self._workspace = SplitWorkspace(SPLIT_CELLS, self._shape, device)
        return self._workspace

    def _decode_tuning(
        self, num_rows: int, queries: Tensor, kv: Tensor, listed: Tensor | None = None, queries_per_row: int = 1
    ) -> DecodeTuning:
        is_listed, device = listed is not None, queries.device
        return decode_tuning(self._shape, num_rows, queries.dtype, device, format_of(kv), is_listed, queries_per_row)

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
