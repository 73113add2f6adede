"""Drafters on a GPU that read the target's states: EAGLE, EAGLE-3 and Medusa heads.

A column keeps the target's last states of each row, one for each place of its last step: which of them belongs to the
last accepted token is known only after the draw. A feature drafter pairs each token with the state before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from millrace.models.batch import ForwardBatch
from millrace.models.drafters.program import EagleDrafter, MedusaDrafter
from millrace.ops.attention.rows import TiledRows
from millrace.run.drafting.device_chain import ChainSetup, DeviceDrafter, DueRows, FedRows, paged
from millrace.run.settings import PLACES

_NOWHERE = -(1 << 20)


class RowStates:
    """The states of each row's last step: of all its places, or of a chunk's last token."""

    def __init__(self, num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._states = torch.zeros((num_rows, PLACES[-1], width), dtype=dtype, device=device)
        self._first = torch.full((num_rows,), _NOWHERE, dtype=torch.int32, device=device)
        """Position of the first state kept."""

    def clear(self, rows: Tensor) -> None:
        self._first[rows] = _NOWHERE

    def at(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Zeros where the state is not known: before the first token, and after a prefix hit."""
        index = positions - self._first[rows]
        is_known = (index >= 0) & (index < PLACES[-1])
        found = self._states[rows, index.clamp(0, PLACES[-1] - 1).long()]
        return torch.where(is_known[:, None], found, torch.zeros_like(found))

    def keep(self, rows: TiledRows, fed: FedRows, states: Tensor) -> None:
        """`states` [tokens, width]: of all tokens of a step."""
        table_rows, starts = rows.table_rows.long(), fed.starts
        if fed.places:
            self._states[table_rows, : fed.places] = states.view(len(table_rows), fed.places, -1)
            self._first[table_rows] = starts
            return
        counts = rows.query_starts[1:] - rows.query_starts[:-1]
        last = (rows.query_starts[1:] - 1).clamp(min=0).long()
        self._states[table_rows, 0] = states[last]
        self._first[table_rows] = starts + counts - 1


class DeviceFeatures(DeviceDrafter):
    """EAGLE and EAGLE-3."""

    reads_states = True

    def __init__(self, setup: ChainSetup, drafter: EagleDrafter, kv: Sequence[Tensor], dtype: torch.dtype) -> None:
        super().__init__(setup)
        self._drafter = drafter
        self._kv = list(kv)
        self._attention = paged(drafter.attention)
        self.taps = drafter.spec.target_layers
        device, num_rows = self._tables.device, self._tables.shape[1]
        self._states = RowStates(num_rows, drafter.spec.hidden_size, dtype, device)

    def admit(self, rows: Tensor) -> None:
        self._states.clear(rows)

    def feed(self, batch: ForwardBatch, fed: FedRows) -> None:
        assert fed.states is not None
        fused, rows = self._drafter.fuse(fed.states), batch.rows
        assert isinstance(rows, TiledRows)
        before = self._before(rows, fed, fused)
        self._states.keep(rows, fed, fused)
        own = replace(batch, block_ids=batch.block_ids[:1], rows=self._own_rows(batch, self._attention))
        self._drafter.write(before, own, self._kv)

    def _before(self, rows: TiledRows, fed: FedRows, fused: Tensor) -> Tensor:
        """The state before each token of the step."""
        first_of, count = self._states.at(rows.table_rows.long(), fed.starts - 1), len(fused)
        if fed.places == 1:
            return first_of
        # Rows without tokens begin where the next one does, or at the end.
        at = torch.arange(count, dtype=torch.int32, device=fused.device)
        row_of = torch.searchsorted(rows.query_starts[1:].contiguous(), at, right=True).clamp(max=len(first_of) - 1)
        is_first = rows.query_starts[row_of] == at
        return torch.where(is_first[:, None], first_of[row_of], fused.roll(1, 0))

    def _first_states(self, rows: Tensor, known: Tensor, num_drafts: int) -> Tensor:
        return self._states.at(rows, known - 2)

    def _draft(self, due: DueRows, states: Tensor | None, place: int) -> tuple[Tensor, Tensor | None]:
        assert states is not None
        found = self._drafter.step(states, self._single_batch(due, self._attention), self._kv)
        drawn = self._draw(self._drafter.logits(found.for_head), due)
        return self._drafter.token_ids(drawn), found.hidden


class DeviceMedusa(DeviceDrafter):
    reads_states = True

    def __init__(self, setup: ChainSetup, heads: MedusaDrafter, dtype: torch.dtype) -> None:
        super().__init__(setup)
        self._heads = heads
        self.max_drafts = heads.spec.num_medusa_heads
        device, num_rows = self._tables.device, self._tables.shape[1]
        self._states = RowStates(num_rows, heads.spec.target_hidden_size, dtype, device)

    def admit(self, rows: Tensor) -> None:
        self._states.clear(rows)

    def feed(self, batch: ForwardBatch, fed: FedRows) -> None:
        assert fed.states is not None
        assert isinstance(batch.rows, TiledRows)
        self._states.keep(batch.rows, fed, fed.states)

    def _first_states(self, rows: Tensor, known: Tensor, num_drafts: int) -> Tensor:
        return self._heads.logits(self._states.at(rows, known - 2), num_drafts)

    def _draft(self, due: DueRows, states: Tensor | None, place: int) -> tuple[Tensor, Tensor | None]:
        """`states`: the logits of all heads."""
        assert states is not None
        return self._heads.token_ids(self._draw(states[place], due)), states
