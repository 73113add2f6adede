"""A draft model on a GPU: it drafts from the device's columns, without waiting for the host.

At the head of a step with places for drafts, `propose` computes each row's last token and then its own drafts, one
after the other, and writes them behind the row's known tokens, where the step reads them. In the body of every step,
`feed` computes all of the step's tokens: whatever the target has computed, the draft model has too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from millrace.models.batch import ForwardBatch, LastTokens
from millrace.models.decoder import Decoder
from millrace.ops.attention import PagedAttention
from millrace.ops.attention.rows import TiledRows
from millrace.ops.triton.drafts import DraftColumns
from millrace.run.sampling.device_sampler import DeviceSampler
from millrace.run.table.request_table import RequestTable


class DeviceChain:
    def __init__(
        self,
        model: Decoder,
        kv: Sequence[Tensor],
        table: RequestTable,
        sampler: DeviceSampler,
        columns: DraftColumns,
        *,
        max_rows: int,
        block_size: int,
        queries_per_tile: int,
        vocab_size: int,
    ) -> None:
        """`queries_per_tile`: of the target's tiles; `vocab_size`: of the target."""
        if not isinstance(model.attention, PagedAttention):
            raise TypeError("a draft model on a GPU needs paged attention")
        self._model, self._kv, self._sampler, self._columns = model, list(kv), sampler, columns
        self._tables = table.block_tables[:1]
        self._block_size, self._queries_per_tile, self._vocab_size = block_size, queries_per_tile, vocab_size
        device = self._tables.device
        self._numbers = torch.arange(max_rows + 2, dtype=torch.int32, device=device)
        self._drawn = torch.zeros(max_rows + 1, dtype=torch.int64, device=device)
        self._no_index = torch.zeros(0, dtype=torch.int64, device=device)

    def feed(self, batch: ForwardBatch) -> None:
        """Compute the tokens of the target's batch. Only keys and values are needed."""
        rows = batch.rows
        assert isinstance(rows, TiledRows)
        own = replace(rows, block_tables=self._tables, tiles=self._tiles(rows), decode_rows=None, context_parts=1)
        none = TiledRows(self._numbers[:1], self._numbers[:0], self._tables, table_rows=self._numbers[:0])
        self._model.forward(
            ForwardBatch(
                token_ids=self._known(batch.token_ids),
                positions=batch.positions,
                block_ids=batch.block_ids[:1],
                offsets=batch.offsets,
                rows=own,
                last=LastTokens(self._no_index, none),
            ),
            self._kv,
        )

    def propose(self, table_rows: Tensor, max_drafts: Tensor, num_drafts: int) -> None:
        """Draft up to `num_drafts` tokens for each of these rows. `max_drafts`: drafts of each in this step; rows
        without any are left alone."""
        columns, rows = self._columns, table_rows.long()
        known, limit = columns.known[rows], columns.limit[rows]
        drafts = torch.minimum(max_drafts, limit - known - 1)
        for place in range(num_drafts):
            is_due = drafts > place
            positions = torch.where(is_due, known - 1 + place, 0)
            tokens = self._draft(table_rows, rows, positions, is_due)
            old = columns.history[rows, (positions + 1).long()]
            columns.history[rows, (positions + 1).long()] = torch.where(is_due, tokens.to(old.dtype), old)

    def _draft(self, table_rows: Tensor, rows: Tensor, positions: Tensor, is_due: Tensor) -> Tensor:
        """Compute one token of each row, and draw the next one. Rows that are not due write to the scratch block."""
        count, places = len(rows), positions.long()
        blocks = self._tables[0, rows, places // self._block_size].long()
        batch = ForwardBatch(
            token_ids=self._known(self._columns.history[rows, places].long()),
            positions=places,
            block_ids=torch.where(is_due, blocks, 0)[None],
            offsets=places % self._block_size,
            rows=TiledRows(
                self._numbers[: count + 1],
                (positions + 1).int(),
                self._tables,
                table_rows=table_rows,
                tiles=self._single_tiles(count),
                has_decode_rows=not self._is_tiled,
            ),
        )
        logits = self._model.logits(self._model.forward(batch, self._kv))[:, : self._model.spec.vocab_size]
        drawn = self._drawn[:count]
        own_rows = torch.where(is_due, table_rows, -1)
        self._sampler.draw_drafts(logits, own_rows, (positions + 1).int(), drawn)
        # Padding of the draft model's vocabulary is no token of the target.
        return torch.where(drawn < self._vocab_size, drawn, 0)

    @property
    def _is_tiled(self) -> bool:
        attention = self._model.attention
        assert isinstance(attention, PagedAttention)
        return attention.tile_decode_rows

    def _known(self, tokens: Tensor) -> Tensor:
        """Tokens that the draft model lacks are padding of the target's vocabulary."""
        size = self._model.spec.vocab_size
        return tokens if size >= self._vocab_size else torch.where(tokens < size, tokens, 0)

    def _single_tiles(self, count: int) -> Tensor | None:
        if not self._is_tiled:
            return None
        numbers = self._numbers[:count]
        return torch.stack([numbers, torch.zeros_like(numbers)], dim=1)

    def _tiles(self, rows: TiledRows) -> Tensor | None:
        """The target's tiles, each cut into as many as this model's attention needs for its queries."""
        attention, tiles = self._model.attention, rows.tiles
        assert isinstance(attention, PagedAttention)
        own = attention.queries_per_tile
        if tiles is None or own >= self._queries_per_tile:
            return tiles
        parts = torch.arange(-(-self._queries_per_tile // own), dtype=torch.int32, device=tiles.device) * own
        row, first = tiles[:, :1].expand(-1, len(parts)), tiles[:, 1:] + parts
        safe = row.clamp(min=0).long()
        counts = rows.query_starts[safe + 1] - rows.query_starts[safe]
        is_real = (row >= 0) & (first < counts) & (parts < self._queries_per_tile)
        return torch.stack([torch.where(is_real, row, -1), first], dim=2).flatten(0, 1).contiguous()
