"""Draws tokens on a GPU inside a captured graph: what `sampler.py` does, by the kernels of ops/triton/sampling.

The kernels know each row by a record of 128 bytes on the device, written when the row is admitted. Rows that need one
word per token of the vocabulary (adjusted logits, token counts, bias) get vocabulary buffers, whose addresses are in
the record: allocating more buffers moves none, so captured graphs stay valid. Shaped rows are drawn a second time, by
`shaped_rows.py` after the graph, from the adjusted logits in their buffers.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millrace.errors import RequestFailed
from millrace.ops.triton.row_records import (
    ADDRESS_WORDS,
    ENDS_WORDS,
    IN_PROMPT,
    MAX_ENDS,
    ROW_DTYPE,
    ROW_STRUCT,
    ROW_WORDS,
    scatter_rows,
)
from millrace.ops.triton.sampling.draw import Cut, MaskLines, draw_full
from millrace.ops.triton.sampling.greedy import RACE_START, draw_greedy
from millrace.params.draws import DrawParams
from millrace.plan.step import Admission, Int32s, StepPlan, Variant
from millrace.run.device.device import Device
from millrace.run.sampling.draw_plan import DrawPlan
from millrace.run.sampling.row_params import RowParamTable
from millrace.run.sampling.shaped_rows import ShapedRows
from millrace.run.table.request_table import RequestTable

BUFFERS_AT_ONCE = 8
"""Buffers allocated together. Each has 4 bytes per token of the vocabulary: about 0.6 MB for 151,936 tokens."""
_NO_RECORDS = np.zeros((0, ROW_WORDS), np.int32)


class VocabBuffers:
    """Vocabulary buffers, one word per token, assigned to rows. Allocated on demand, kept and never moved."""

    def __init__(self, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._dtype = dtype
        self._device = device
        self._free: list[Tensor] = []
        self._of_row: dict[int, Tensor] = {}

    def take(self, row: int) -> Tensor:
        """The row's buffer, uninitialised."""
        if row not in self._of_row:
            if not self._free:
                shape = (BUFFERS_AT_ONCE, self._vocab_size)
                self._free.extend(torch.empty(shape, dtype=self._dtype, device=self._device).unbind())
            self._of_row[row] = self._free.pop()
        return self._of_row[row]

    def release(self, row: int) -> None:
        buffer = self._of_row.pop(row, None)
        if buffer is not None:
            self._free.append(buffer)

    def __contains__(self, row: int) -> bool:
        return row in self._of_row

    def address(self, row: int) -> int:
        buffer = self._of_row.get(row)
        return 0 if buffer is None else buffer.data_ptr()


class DeviceSampler:
    def __init__(
        self, device: Device, table: RequestTable, *, max_rows: int, vocab_size: int, cut: Cut | None = None
    ) -> None:
        torch_device = device.torch_device
        self._device = device
        self._vocab_size = vocab_size
        self._cut = cut
        self._table = table
        self._last_tokens = table.last_tokens
        self._columns = torch.zeros((max_rows, ROW_WORDS), dtype=torch.int32, device=torch_device)
        self._ends = torch.zeros((max_rows, MAX_ENDS), dtype=torch.int32, device=torch_device)
        self._draft_tokens = torch.zeros(max_rows, dtype=torch.int64, device=torch_device)
        """Takes the place of the table's last tokens when drafts are drawn."""
        self._races = torch.full((max_rows,), RACE_START, dtype=torch.int64, device=torch_device)
        self._arrivals = torch.zeros(max_rows, dtype=torch.int32, device=torch_device)
        self._adjusted = VocabBuffers(vocab_size, torch.float32, torch_device)
        self._counts = VocabBuffers(vocab_size, torch.int32, torch_device)
        self._bias = VocabBuffers(vocab_size, torch.float32, torch_device)
        self.row_params = RowParamTable(max_rows=max_rows, vocab_size=vocab_size)
        self._shaped = ShapedRows(device, table, self.row_params, vocab_size=vocab_size)
        self._records = np.zeros((max_rows, ROW_WORDS), np.int32)
        """The records on the host, as last sent."""

    @property
    def columns(self) -> Tensor:
        """The records of all table rows, int32 [rows, ROW_WORDS]. The tensor never moves."""
        return self._columns

    def update(self, plan: StepPlan) -> None:
        """Apply the plan's releases and admissions, except for the records on the device: see `records`."""
        for release in plan.released:
            self._release(release.row)
            self._shaped.release(release)
        if plan.admitted:
            packed = b"".join([ROW_STRUCT.pack(*self._record(admission)) for admission in plan.admitted])
            rows = [admission.row for admission in plan.admitted]
            self._records[rows] = np.frombuffer(packed, np.int32).reshape(-1, ROW_WORDS)

    def records(self, plan: StepPlan) -> Int32s:
        """Records [n, ROW_WORDS] of the rows that the plan admits. The caller must copy them to `columns` before the
        step draws."""
        return self._records[[admission.row for admission in plan.admitted]] if plan.admitted else _NO_RECORDS

    def admit(self, plan: StepPlan) -> None:
        """Update the device's records before the plan's step runs: one upload and one kernel, and more only for rows
        with vocabulary buffers or a minimum length."""
        self.update(plan)
        self._send_records(self.records(plan))

    def keep_raw_logits(self, rows: Int32s, draws: DrawPlan) -> None:
        """Masks are applied to the logits in place. Rows that also want log-probabilities, which are those of the raw
        logits, get a buffer for the masked ones at their first such draw. `rows`: those that draw."""
        if not len(draws.masked) or not len(draws.scored):
            return
        wanted = [row for row in rows[np.intersect1d(draws.masked, draws.scored)].tolist() if row not in self._adjusted]
        for row in wanted:
            self._adjusted.take(row)
            self._records[row].view(ROW_DTYPE)["adjusted"] = self._adjusted.address(row)
        self._send_records(self._records[wanted])

    def _send_records(self, records: Int32s) -> None:
        if len(records):
            scatter_rows(self._device.upload(records), self._columns)

    def draw(
        self,
        logits: Tensor,
        rows: Tensor,
        positions: Tensor,
        out_tokens: Tensor,
        variant: Variant,
        out_start: Tensor | None = None,
        out_index: Tensor | None = None,
        masks: MaskLines | None = None,
    ) -> None:
        """Can be captured. `logits` [n, vocab]; `rows` int32, negative for padding; `positions` int32, those of the new
        tokens. Tokens are written to the table's last tokens and to `out_tokens`: that of state i at index
        out_start[0] + out_index[i], by default at i. `masks`: full variant only.

        The logits are unchanged, except for tokens masked in rows without log-probabilities.
        """
        logits, last_tokens = logits[:, : self._vocab_size], self._last_tokens  # the LM head may be padded
        if variant == "greedy":
            draw_greedy(logits, rows, out_tokens, last_tokens, self._races, self._arrivals, out_start, out_index)
            return
        known = self._columns, self._ends
        draw_full(logits, rows, positions, *known, out_tokens, last_tokens, self._cut, out_start, out_index, masks)

    def draw_drafts(self, logits: Tensor, rows: Tensor, positions: Tensor, out_tokens: Tensor) -> None:
        """Draw from a drafter's logits [n, its vocabulary] with the rows' temperature, cuts and noise, but without
        bias, penalties and minimum length. Changes nothing but `out_tokens` [n]. Can be captured."""
        plain = self._columns.clone()
        plain[:, ENDS_WORDS] = 0
        plain[:, ADDRESS_WORDS] = 0
        draw_full(logits, rows, positions, plain, self._ends, out_tokens, self._draft_tokens, self._cut)

    def draw_shaped(self, rows: Int32s, positions: Int32s) -> Tensor:
        """Tokens of shaped rows, int64 [n], after the head has left their adjusted logits in their buffers. They also
        become the table's last tokens. Not captured."""
        adjusted = torch.stack([self._adjusted.take(row) for row in rows.tolist()])
        tokens = self._shaped.draw(adjusted, rows, positions)
        self._table.append_drawn(rows, positions, tokens)
        self._last_tokens[self._device.upload(rows.astype(np.int64))] = tokens
        return tokens

    def _release(self, row: int) -> None:
        for buffers in (self._adjusted, self._counts, self._bias):
            buffers.release(row)

    def _record(self, admission: Admission) -> tuple[float, ...]:
        """The row's record, in the order of ROW_STRUCT. Also fills its vocabulary buffers and end tokens."""
        row, params = admission.row, admission.row_params.params
        values = self.row_params.admit(admission)
        self._shaped.update(admission, is_shaped=values.is_shaped)
        ends = admission.row_params.end_token_ids if values.ends_from else ()
        self._release(row)
        if ends:
            self._fill_ends(row, ends)
        if values.has_bias:
            self._fill_bias(row, params)
        if values.has_penalties:
            self._fill_counts(admission)
        if values.has_penalties or values.has_bias or values.is_shaped or (ends and values.num_logprobs >= 0):
            self._adjusted.take(row)
        return (
            values.temperature,
            values.top_k,
            values.top_p,
            values.min_p,
            values.seed,
            values.ends_from,
            len(ends),
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            row,
            self._adjusted.address(row),
            self._counts.address(row),
            self._bias.address(row),
        )

    def _fill_ends(self, row: int, ends: tuple[int, ...]) -> None:
        if len(ends) > MAX_ENDS:
            raise RequestFailed(
                f"The request has {len(ends)} end tokens; with min_tokens at most {MAX_ENDS} are supported."
            )
        self._ends[row, : len(ends)] = self._device.upload(np.array(ends, np.int32))

    def _fill_bias(self, row: int, params: DrawParams) -> None:
        token_ids, places = np.unique([token_id for token_id, _ in params.logit_bias], return_inverse=True)
        biases = np.zeros(len(token_ids), np.float32)
        np.add.at(biases, places, np.array([bias for _, bias in params.logit_bias], np.float32))
        self._fill(self._bias.take(row), token_ids, biases.view(np.int32))

    def _fill_counts(self, admission: Admission) -> None:
        """The tokens of a request resumed after preemption include its output."""
        prompt, output = admission.tokens[: admission.num_prompt], admission.tokens[admission.num_prompt :]
        token_ids, places = np.unique(admission.tokens, return_inverse=True)
        words = np.zeros(len(token_ids), np.int32)
        words[places[: len(prompt)]] = IN_PROMPT
        np.add.at(words, places[len(prompt) :], np.ones(len(output), np.int32))
        self._fill(self._counts.take(admission.row), token_ids, words)

    def _fill(self, buffer: Tensor, token_ids: npt.NDArray[np.integer], words: Int32s) -> None:
        """Set the buffer to zero except for these tokens. Ids are checked: one out of range would corrupt device
        memory."""
        buffer.zero_()
        if not len(token_ids):
            return
        if token_ids[0] < 0 or token_ids[-1] >= self._vocab_size:
            outside = token_ids[0] if token_ids[0] < 0 else token_ids[-1]
            raise RequestFailed(f"Token id {outside} is outside the model's vocabulary of {self._vocab_size}.")
        columns = self._device.upload(np.stack([token_ids.astype(np.int32), words]))
        buffer.view(torch.int32)[columns[0].long()] = columns[1]
