"""Drafters that are models on a GPU: they draft from the device's columns, without waiting for the host.

At the head of a step with places for drafts, `propose` computes each row's last token and then its own drafts, one
after the other, and writes them behind the row's known tokens, where the step reads them. In the body of every step,
`feed` computes all of the step's tokens: whatever the target has computed, the drafter has too. A draft model is here;
feature drafters and Medusa heads, which read the target's states, are in `device_features.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from millrace.models.batch import ForwardBatch, LastTokens
from millrace.models.decoder import Decoder
from millrace.ops.attention import Attention, PagedAttention
from millrace.ops.attention.rows import TiledRows
from millrace.ops.triton.drafts import DraftColumns
from millrace.run.sampling.device_sampler import DeviceSampler
from millrace.run.table.request_table import RequestTable


@dataclass(frozen=True, slots=True)
class ChainSetup:
    """What every drafter on a GPU works on."""

    table: RequestTable
    sampler: DeviceSampler
    columns: DraftColumns
    max_rows: int
    block_size: int
    queries_per_tile: int
    """Of the target's tiles."""
    vocab_size: int
    """Of the target."""


@dataclass(frozen=True, slots=True)
class FedRows:
    """What a drafter needs of a step beside its batch."""

    starts: Tensor
    """[rows]: position of each row's first token."""
    places: int
    """Tokens of each row; 0 if rows differ."""
    states: Tensor | None
    """[tokens, width]: see `DeviceDrafter.reads_states`."""


@dataclass(frozen=True, slots=True)
class DueRows:
    """Rows that draft a token: the next one after `positions`."""

    table_rows: Tensor
    rows: Tensor
    """The same, int64."""
    positions: Tensor
    """Of the last token known or drafted; 0 for rows that are not due."""
    is_due: Tensor


class DeviceDrafter(ABC):
    reads_states = False
    """True if `feed` needs the target's states of all tokens, after the final norm or at `taps`."""
    taps: tuple[int, ...] = ()
    """After how many layers of the target its residual is read."""
    max_drafts: int | None = None
    """Drafts of a row in one step; None: any number. Rows must not have more places."""

    def __init__(self, setup: ChainSetup) -> None:
        self._sampler = setup.sampler
        self._columns = setup.columns
        self._vocab_size = setup.vocab_size
        self._tables = setup.table.block_tables[:1]
        self._block_size = setup.block_size
        self._queries_per_tile, device = setup.queries_per_tile, self._tables.device
        self._numbers = torch.arange(setup.max_rows + 2, dtype=torch.int32, device=device)
        self._drawn = torch.zeros(setup.max_rows + 1, dtype=torch.int64, device=device)

    def admit(self, rows: Tensor) -> None:
        """New requests get these table rows."""
        return

    @abstractmethod
    def feed(self, batch: ForwardBatch, fed: FedRows) -> None:
        """The target computes this batch. Compute it too: keys and values are needed."""

    def propose(self, table_rows: Tensor, max_drafts: Tensor, num_drafts: int) -> None:
        """Draft up to `num_drafts` tokens for each of these rows. `max_drafts`: drafts of each in this step; rows
        without any are left alone."""
        columns, rows = self._columns, table_rows.long()
        known, limit = columns.known[rows], columns.limit[rows]
        drafts = torch.minimum(max_drafts, limit - known - 1)
        num_drafts = num_drafts if self.max_drafts is None else min(num_drafts, self.max_drafts)
        states = self._first_states(rows, known, num_drafts)
        for place in range(num_drafts):
            is_due = drafts > place
            due = DueRows(table_rows, rows, torch.where(is_due, known - 1 + place, 0), is_due)
            tokens, states = self._draft(due, states, place)
            behind = (due.positions + 1).long()
            old = columns.history[rows, behind]
            columns.history[rows, behind] = torch.where(is_due, tokens.to(old.dtype), old)

    def _first_states(self, rows: Tensor, known: Tensor, num_drafts: int) -> Tensor | None:
        """What the first draft of each row is computed from, for drafters that read the target's states."""
        return None

    @abstractmethod
    def _draft(self, due: DueRows, states: Tensor | None, place: int) -> tuple[Tensor, Tensor | None]:
        """The next token of each row, and the states for the one after it. Rows that are not due write to the scratch
        block."""

    def _draw(self, logits: Tensor, due: DueRows) -> Tensor:
        """As the target draws for these rows at these positions."""
        drawn = self._drawn[: len(due.rows)]
        own_rows = torch.where(due.is_due, due.table_rows, -1)
        self._sampler.draw_drafts(logits, own_rows, (due.positions + 1).int(), drawn)
        return drawn

    def _single_batch(self, due: DueRows, attention: PagedAttention) -> ForwardBatch:
        """One token of each row."""
        count, places = len(due.rows), due.positions.long()
        blocks = self._tables[0, due.rows, places // self._block_size].long()
        numbers = self._numbers[:count]
        is_tiled = attention.tile_decode_rows
        return ForwardBatch(
            token_ids=self._columns.history[due.rows, places].long(),
            positions=places,
            block_ids=torch.where(due.is_due, blocks, 0)[None],
            offsets=places % self._block_size,
            rows=TiledRows(
                self._numbers[: count + 1],
                (due.positions + 1).int(),
                self._tables,
                table_rows=due.table_rows,
                tiles=torch.stack([numbers, torch.zeros_like(numbers)], dim=1) if is_tiled else None,
                has_decode_rows=not is_tiled,
            ),
        )

    def _own_rows(self, batch: ForwardBatch, attention: PagedAttention) -> TiledRows:
        """The rows of the target's batch, for this drafter's attention."""
        rows = batch.rows
        assert isinstance(rows, TiledRows)
        tiles = self._tiles(rows, attention.queries_per_tile)
        return replace(rows, block_tables=self._tables, tiles=tiles, decode_rows=None, context_parts=1)

    def _tiles(self, rows: TiledRows, own: int) -> Tensor | None:
        """The target's tiles, each cut into as many as an attention with `own` queries in a tile needs."""
        tiles = rows.tiles
        if tiles is None or own >= self._queries_per_tile:
            return tiles
        parts = torch.arange(-(-self._queries_per_tile // own), dtype=torch.int32, device=tiles.device) * own
        row, first = tiles[:, :1].expand(-1, len(parts)), tiles[:, 1:] + parts
        safe = row.clamp(min=0).long()
        counts = rows.query_starts[safe + 1] - rows.query_starts[safe]
        is_real = (row >= 0) & (first < counts) & (parts < self._queries_per_tile)
        return torch.stack([torch.where(is_real, row, -1), first], dim=2).flatten(0, 1).contiguous()


class DeviceChain(DeviceDrafter):
    """A draft model."""

    def __init__(self, setup: ChainSetup, model: Decoder, kv: Sequence[Tensor]) -> None:
        super().__init__(setup)
        self._model = model
        self._kv = list(kv)
        self._attention = paged(model.attention)
        self._no_index = torch.zeros(0, dtype=torch.int64, device=self._tables.device)

    def feed(self, batch: ForwardBatch, fed: FedRows) -> None:
        none = TiledRows(self._numbers[:1], self._numbers[:0], self._tables, table_rows=self._numbers[:0])
        own = ForwardBatch(
            token_ids=self._known(batch.token_ids),
            positions=batch.positions,
            block_ids=batch.block_ids[:1],
            offsets=batch.offsets,
            rows=self._own_rows(batch, self._attention),
            last=LastTokens(self._no_index, none),
        )
        self._model.forward(own, self._kv)

    def _draft(self, due: DueRows, states: Tensor | None, place: int) -> tuple[Tensor, Tensor | None]:
        batch = self._single_batch(due, self._attention)
        batch.token_ids = self._known(batch.token_ids)
        logits = self._model.logits(self._model.forward(batch, self._kv))[:, : self._model.spec.vocab_size]
        drawn = self._draw(logits, due)
        # Padding of the draft model's vocabulary is no token of the target.
        return torch.where(drawn < self._vocab_size, drawn, 0), None

    def _known(self, tokens: Tensor) -> Tensor:
        """Tokens that the draft model lacks are padding of the target's vocabulary."""
        size = self._model.spec.vocab_size
        return tokens if size >= self._vocab_size else torch.where(tokens < size, tokens, 0)


def paged(attention: Attention) -> PagedAttention:
    if not isinstance(attention, PagedAttention):
        raise TypeError("a runner of captured steps needs paged attention")
    return attention
