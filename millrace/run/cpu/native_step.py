"""A CPU step in two C++ calls, from the request table to hidden states and from those to drawn tokens, or in one."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from millrace.models.adapters.slots import AdapterSlots
from millrace.models.batch import Taps
from millrace.models.native_stack import KINDS, DrawStep, ForwardStep, NativeStack, describe_adapters
from millrace.ops.head.draw import checked_masks
from millrace.plan.step import Bools, Int32s, Masks
from millrace.run.table.batch import StepRows
from millrace.run.table.inputs import host_tokens
from millrace.run.table.request_table import RequestTable

if TYPE_CHECKING:
    from millrace.run.sampling.sampler import Sampler


class NativeStep:
    """Constant addresses are written once; each step's columns are copied into one array."""

    def __init__(
        self,
        stack: NativeStack,
        kv: Sequence[Tensor],
        table: RequestTable,
        sampler: Sampler,
        *,
        max_rows: int,
        slots: AdapterSlots | None = None,
    ) -> None:
        """The model's KV groups are the table's first ones. `slots`: of the adapters that rows may have."""
        self._slots = slots
        self._adapters = None if slots is None else describe_adapters(slots)
        self._stack = stack
        self._kv = kv
        self._table = table
        self._sampler = sampler
        self._columns = np.zeros((4, max_rows), np.int32)
        self._states = np.zeros((2, max_rows), np.int32)
        self._hidden = torch.empty((max_rows, stack.hidden_size), dtype=stack.dtype)
        self.nanoseconds: Tensor | None = None
        """int64, one entry per native_stack.KINDS: if set, the time of each kind of work is added here."""
        self._body, self._head = self._make_body(), self._make_head()
        self._joined = self._make_body(), self._make_head()
        state_rows, state_positions = (part.ctypes.data for part in self._states)
        body, head = self._joined
        body.out = head.hidden = self._hidden.data_ptr()
        body.state_rows = head.rows = state_rows
        body.state_positions = head.positions = state_positions

    def _make_body(self) -> ForwardStep:
        rows, starts, counts, draws = (part.ctypes.data for part in self._columns)
        tables = self._table.block_tables
        body = ForwardStep(
            rows=rows,
            starts=starts,
            counts=counts,
            draws=draws,
            prompts=self._table.num_prompt.ctypes.data,
            last_tokens=self._table.last_tokens.data_ptr(),
            tables=tables.data_ptr(),
            groups=self._stack.num_groups,
            table_rows=tables.shape[1],
            table_width=tables.shape[2],
            slots=self._table.adapters.ctypes.data,
        )
        self._stack.bind(body, self._kv)
        return body

    def _make_head(self) -> DrawStep:
        params = self._sampler.row_params
        return DrawStep(
            temperature=params.temperature.ctypes.data,
            top_p=params.top_p.ctypes.data,
            min_p=params.min_p.ctypes.data,
            top_k=params.top_k.ctypes.data,
            seeds=params.seed.ctypes.data,
            last_tokens=self._table.last_tokens.data_ptr(),
        )

    def can_run(self, step: StepRows) -> bool:
        """True if no row needs more than its token: log-probabilities, a bias, penalties or a minimum length."""
        rows = step.rows
        return step.scored is None and step.pooled is None and not self._sampler.row_params.is_adjusted[rows].any()

    def __call__(self, step: StepRows) -> Tensor:
        """`forward` and `draw` in one call, only if `can_run`. int64: the drawn tokens, in plan order."""
        body, head = self._joined
        self._fill(body, step.rows, step.starts, step.counts, step.samples)
        tokens = self._host_tokens(step)
        drawn = torch.empty(int(step.samples.sum()), dtype=torch.int64)
        body.num_rows, head.num_states = len(step.rows), len(drawn)
        body.tokens = None if tokens is None else tokens.ctypes.data
        head.drawn = drawn.data_ptr()
        body.nanoseconds = head.nanoseconds = self._counters()
        self._stack.step(body, head, int((step.starts + step.counts).max()))
        return drawn

    def forward(self, step: StepRows, draws: Int32s | None = None, taps: Taps | None = None) -> Tensor:
        """Hidden states [n, hidden] of the rows that draw, in plan order: of the last `draws` tokens of each row, by
        default of the last token."""
        draws_of = step.samples if draws is None else draws
        return self.forward_rows(step.rows, step.starts, step.counts, draws_of, self._host_tokens(step), taps)

    def forward_rows(
        self,
        rows: Int32s,
        starts: Int32s,
        counts: Int32s,
        draws: Int32s | Bools,
        tokens: Int32s | None,
        taps: Taps | None = None,
    ) -> Tensor:
        """Compute `counts` tokens of each row, from `starts` on. Hidden states [sum of draws, hidden] of the last
        `draws` tokens of each row, at most `counts`. `tokens`, contiguous: ids, ON_DEVICE for a row's last drawn token;
        None if all are. A row that verifies drafts has its last token, the drafts, and a draw at each of them."""
        if (draws > counts).any():
            row = int(np.flatnonzero(draws > counts)[0])
            raise ValueError(f"row {rows[row]} has {draws[row]} draws but only {counts[row]} tokens in this step")
        body = self._body
        self._fill(body, rows, starts, counts, draws)
        hidden = torch.empty((int(draws.sum()), self._stack.hidden_size), dtype=self._stack.dtype)
        body.num_rows, body.out = len(rows), hidden.data_ptr()
        body.tokens = None if tokens is None else tokens.ctypes.data
        body.nanoseconds = self._counters()
        body.num_taps = 0 if taps is None else len(taps.layers)
        if taps is not None:
            body.tap_layers, body.taps = taps.layers.ctypes.data, taps.out.data_ptr()
        self._stack.forward(body, int((starts + counts).max()))
        return hidden

    def forward_pairs(
        self, rows: Int32s, starts: Int32s, counts: Int32s, draws: Int32s, tokens: Int32s, states: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`forward_rows` of a feature drafter. `states` [tokens, hidden]: the target's, one position before each token.
        Returns hidden states, and the sums that the final norm is of."""
        states = states.contiguous()
        residuals = torch.empty((int(draws.sum()), self._stack.hidden_size), dtype=self._stack.dtype)
        self._body.states, self._body.residuals = states.data_ptr(), residuals.data_ptr()
        return self.forward_rows(rows, starts, counts, draws, tokens), residuals

    def draw(
        self,
        hidden: Tensor,
        rows: Int32s,
        positions: Int32s,
        masks: Masks | None = None,
        is_last: Bools | None = None,
    ) -> Tensor:
        """Draw a token from each hidden state [n, hidden]: int64 [n]. `rows`: the states' table rows; `positions`:
        those of the new tokens. Where `is_last`, the token becomes its row's last one; None: everywhere."""
        head, hidden = self._head, hidden.contiguous()
        columns = np.ascontiguousarray(rows, np.int32), np.ascontiguousarray(positions, np.int32)
        drawn = torch.empty(len(rows), dtype=torch.int64)
        head.hidden, head.drawn, head.num_states = hidden.data_ptr(), drawn.data_ptr(), len(rows)
        head.rows, head.positions = (part.ctypes.data for part in columns)
        head.is_last = None if is_last is None else is_last.ctypes.data
        head.num_masks = 0
        if masks is not None:
            index, bits = checked_masks(masks.index, masks.bits, self._stack.vocab_size)
            head.num_masks, head.masked, head.mask_bits = len(index), index.ctypes.data, bits.ctypes.data
        head.nanoseconds = self._counters()
        self._stack.draw(head)
        return drawn

    def measure(self) -> Tensor:
        """Start timing each kind of work; returns the counters, in nanoseconds."""
        self.nanoseconds = torch.zeros(len(KINDS), dtype=torch.int64)
        return self.nanoseconds

    def _counters(self) -> int | None:
        return None if self.nanoseconds is None else self.nanoseconds.data_ptr()

    def _fill(self, body: ForwardStep, rows: Int32s, starts: Int32s, counts: Int32s, draws: Int32s | Bools) -> None:
        columns, num_rows = self._columns, len(rows)
        adapters = self._adapters
        if adapters is not None:
            body.adapters = ctypes.addressof(adapters) if self._table.adapters[rows].any() else None
        columns[0, :num_rows], columns[1, :num_rows] = rows, starts
        columns[2, :num_rows], columns[3, :num_rows] = counts, draws

    def _host_tokens(self, step: StepRows) -> Int32s | None:
        if not (step.starts < self._table.num_admitted[step.rows]).any():
            return None
        query_starts = np.zeros(len(step.rows) + 1, np.int32)
        np.cumsum(step.counts, out=query_starts[1:])
        return host_tokens(step, self._table, query_starts)
