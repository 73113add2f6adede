"""The forward passes of drafters that are models, op by op, on any device."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from millrace.models.batch import ForwardBatch
from millrace.models.decoder import Decoder
from millrace.models.drafters.program import EagleDrafter
from millrace.plan.step import Int32s
from millrace.run.drafting.chain import DraftInputs, DraftPass, PassStates
from millrace.run.sampling.sampler import Sampler
from millrace.run.table.batch import StepBatch
from millrace.run.table.inputs import gather_inputs
from millrace.run.table.request_table import RequestTable

UNKNOWN = 0
"""Takes the place of tokens that are padding of the target's vocabulary, which a draft model lacks."""


class DraftTable:
    """The request table as a drafter reads it: tokens that it is given, and the blocks of the first KV group."""

    def __init__(self, table: RequestTable, block_size: int) -> None:
        self._device = table.device
        self._block_size = block_size
        self._table = copy.copy(table)
        self._table.block_tables = table.block_tables[:1]
        self._table.tokens = list(table.tokens)
        self._table.num_admitted = table.num_admitted.copy()

    def gather(self, inputs: DraftInputs) -> ForwardBatch:
        rows, starts, counts = inputs.rows, inputs.starts, inputs.counts
        parts = np.split(inputs.tokens, np.cumsum(counts)[:-1])
        for row, start, part in zip(rows.tolist(), starts.tolist(), parts, strict=True):
            self._table.tokens[row] = np.concatenate([np.zeros(start, np.int32), part])
        self._table.num_admitted[rows] = starts + counts
        batch = StepBatch(rows, starts, counts, np.ones(len(rows), np.bool_))
        return gather_inputs(batch, self._table, self._device, self._block_size)

    def last(self, inputs: DraftInputs, states: Tensor) -> Tensor:
        """Of all tokens' states, those of each row's last token."""
        if len(states) == len(inputs.rows):
            return states
        return states[self._device.upload(np.cumsum(inputs.counts).astype(np.int32) - 1).long()]


class PlainDraftPass(DraftPass):
    """A draft model."""

    no_states = None

    def __init__(self, decoder: Decoder, kv: Sequence[Tensor], table: DraftTable, sampler: Sampler) -> None:
        self._decoder = decoder
        self._kv = kv
        self._table = table
        self._sampler = sampler

    def forward(self, inputs: DraftInputs) -> PassStates:
        batch = self._table.gather(inputs)
        batch.token_ids = batch.token_ids.where(batch.token_ids < self._decoder.spec.vocab_size, UNKNOWN)
        return PassStates(self._table.last(inputs, self._decoder.forward(batch, self._kv)), None)

    def write(self, inputs: DraftInputs) -> None:
        self.forward(inputs)

    def fuse(self, states: Tensor) -> Tensor:
        return states

    def draw(self, states: PassStates, rows: Int32s, positions: Int32s) -> Int32s:
        logits = self._decoder.logits(states.for_head, draws=True)
        return self._sampler.choose(logits, rows, positions).cpu().numpy().astype(np.int32)


class EaglePass(DraftPass):
    """A feature drafter. Its keys and values for the target's state at position i and the token at i + 1 are in the
    slot of that token: what a block holds follows from the tokens up to its end, as the block's hash says."""

    def __init__(
        self,
        drafter: EagleDrafter,
        kv: Sequence[Tensor],
        table: DraftTable,
        sampler: Sampler,
        dtype: torch.dtype,
    ) -> None:
        self._drafter = drafter
        self._kv = kv
        self._table = table
        self._sampler = sampler
        self.no_states = torch.zeros((0, drafter.spec.hidden_size), dtype=dtype, device=kv[0].device)

    def fuse(self, states: Tensor) -> Tensor:
        return self._drafter.fuse(states)

    def forward(self, inputs: DraftInputs) -> PassStates:
        assert inputs.states is not None
        states = self._drafter.step(inputs.states, self._table.gather(inputs), self._kv)
        return PassStates(self._table.last(inputs, states.for_head), self._table.last(inputs, states.hidden))

    def write(self, inputs: DraftInputs) -> None:
        assert inputs.states is not None
        self._drafter.write(inputs.states, self._table.gather(inputs), self._kv)

    def draw(self, states: PassStates, rows: Int32s, positions: Int32s) -> Int32s:
        chosen = self._sampler.choose(self._drafter.logits(states.for_head), rows, positions)
        return self._drafter.token_ids(chosen).cpu().numpy().astype(np.int32)
