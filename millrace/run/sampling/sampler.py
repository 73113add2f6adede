"""Draws the next token of every row whose last known token was computed.

Order, per row: grammar mask, logit bias, minimum length, penalties, then temperature, top-k, min-p, top-p, and one draw
by inverting the cumulative distribution at a uniform number keyed by (seed, position). Greedy rows skip everything from
temperature on. Rows with further options (docs/api/samplers.md) are drawn by `shaped_rows.py`. Log-probabilities are
those of the raw logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from millrace.ops.head.draw import NativeDraw, native_missing
from millrace.params.rows import RowParams
from millrace.plan.step import Int32s, Int64s, StepPlan
from millrace.run.device.device import Device
from millrace.run.sampling.cuts import draw_from, keep_min_p, keep_nucleus, keep_top_k
from millrace.run.sampling.logprobs import LogprobColumns, score
from millrace.run.sampling.masks import Masks, apply_masks
from millrace.run.sampling.noise import uniforms
from millrace.run.sampling.penalties import NO_DRAFT, Penalties
from millrace.run.sampling.row_params import RowParamTable
from millrace.run.sampling.shaped_rows import ShapedRows
from millrace.run.table.request_table import RequestTable


@dataclass(frozen=True, slots=True)
class Drawn:
    tokens: Tensor
    """int64, one per row that draws."""
    logprobs: LogprobColumns | None
    logprob_index: Int64s
    """Indices of the drawn tokens with log-probabilities; `logprob_counts` has the number of top tokens for each."""
    logprob_counts: Int32s


class Sampler:
    def __init__(self, device: Device, table: RequestTable, *, max_rows: int, vocab_size: int) -> None:
        self._device = device
        self._table = table
        self._penalties = Penalties(vocab_size, device.torch_device)
        has_native = device.kind == "cpu" and not native_missing(device.torch_device)
        self.native_draw = NativeDraw() if has_native else None
        self.row_params = RowParamTable(max_rows=max_rows, vocab_size=vocab_size)
        self.shaped = ShapedRows(device, table, self.row_params, vocab_size=vocab_size)

    def update(self, plan: StepPlan) -> None:
        for release in plan.released:
            self._penalties.release(release.row)
            self.shaped.release(release)
        for admission in plan.admitted:
            values = self.row_params.admit(admission)
            if values.has_penalties:
                self._penalties.admit(admission.row, self._table.known_tokens(admission.row), admission.num_prompt)
            else:
                self._penalties.release(admission.row)
            self.shaped.update(admission, is_shaped=values.is_shaped)

    def draw(
        self,
        logits: Tensor,
        rows: Int32s,
        positions: Int32s,
        masks: Masks | None = None,
        drafts: Int32s | None = None,
    ) -> Drawn:
        """`logits` float32 [n, vocab], may be overwritten; `positions`: those of the new tokens. `drafts`: the draft
        before each draw, which penalties count; what is drawn is then counted only by `count`, and who verifies the
        drafts appends what is accepted."""
        num_logprobs = self.row_params.num_logprobs[rows]
        scored = np.flatnonzero(num_logprobs >= 0)
        raw = logits[torch.from_numpy(scored).to(logits.device)] if len(scored) else None
        if masks is not None and self.native_draw is not None:
            self.native_draw.mask(logits, masks.index, masks.bits)
        elif masks is not None:
            apply_masks(logits, masks)
        self.constrain(logits, rows, positions, drafts)
        shaped = np.flatnonzero(self.row_params.is_shaped[rows])
        if len(shaped) == len(rows):
            tokens = self.shaped.draw(logits, rows, positions)
        else:
            own_index = torch.from_numpy(shaped).to(logits.device)
            own = logits[own_index] if len(shaped) else None
            tokens = self.choose(logits, rows, positions)
            if own is not None:
                tokens[own_index] = self.shaped.draw(own, rows[shaped], positions[shaped])
        if drafts is None:
            self.count(rows, tokens)
            self._table.append_drawn(rows, positions, tokens)
        logprobs = None
        if raw is not None:
            num_top = max(1, int(num_logprobs[scored].max()))
            logprobs = score(raw, tokens[torch.from_numpy(scored).to(tokens.device)], num_top)
        return Drawn(tokens, logprobs, scored, num_logprobs[scored])

    def count(self, rows: Int32s, tokens: Tensor) -> None:
        """These tokens were drawn, and accepted if they were drafts."""
        for index in np.flatnonzero(self.row_params.has_penalties[rows]).tolist():
            self._penalties.count(int(rows[index]), tokens[index])

    def constrain(self, logits: Tensor, rows: Int32s, positions: Int32s, drafts: Int32s | None = None) -> None:
        """Apply bias, minimum length and penalties to the few rows that have them. Penalties count the drafts before
        the draw."""
        counted: list[tuple[int, int]] = []
        columns = self.row_params
        early = positions < columns.ends_from[rows]
        touched = columns.has_bias[rows] | columns.has_penalties[rows] | early
        for index in np.flatnonzero(touched).tolist():
            row = int(rows[index])
            row_params = self._table.params[row]
            if columns.has_bias[row]:
                self._add_bias(logits, index, row_params)
            if early[index]:
                logits[index, torch.tensor(row_params.end_token_ids, device=logits.device)] = -torch.inf
            if columns.has_penalties[row]:
                if drafts is not None and drafts[index] != NO_DRAFT:
                    counted.append((row, int(drafts[index])))
                    self._penalties.count(*counted[-1])
                self._penalties.apply(logits, index, row, row_params.params)
        for row, draft in counted:
            self._penalties.count(row, draft, -1)

    def _add_bias(self, logits: Tensor, index: int, row_params: RowParams) -> None:
        token_ids, biases = zip(*row_params.params.logit_bias, strict=True)
        added = torch.tensor(biases, dtype=logits.dtype, device=logits.device)
        logits[index].index_add_(0, torch.tensor(token_ids, device=logits.device), added)

    def choose(self, logits: Tensor, rows: Int32s, positions: Int32s) -> Tensor:
        """Temperature, cuts and the draw: int64, a token for each row of the logits, which may be overwritten. They may
        be those of a draft model, with another number of tokens."""
        columns = self.row_params
        if self.native_draw is not None:
            limits = (columns.temperature[rows], columns.top_k[rows], columns.top_p[rows], columns.min_p[rows])
            return self.native_draw(logits, *limits, uniforms(columns.seed[rows], positions.astype(np.uint64)))
        random = np.flatnonzero(columns.temperature[rows] > 0)
        if len(random) == 0:
            return logits.argmax(dim=-1)
        if len(random) == len(rows):
            return self._draw_random(logits, rows, positions)
        tokens = logits.argmax(dim=-1)
        index = torch.from_numpy(random).to(logits.device)
        tokens[index] = self._draw_random(logits[index], rows[random], positions[random])
        return tokens

    def _draw_random(self, logits: Tensor, rows: Int32s, positions: Int32s) -> Tensor:
        columns = self.row_params
        scaled = logits / self._column(columns.temperature[rows])
        top_k = np.minimum(columns.top_k[rows], logits.shape[1])
        if top_k.any():
            keep_top_k(scaled, self._column(top_k), int(top_k.max()))
        if (columns.min_p[rows] > 0).any():
            keep_min_p(scaled, self._column(columns.min_p[rows]))
        if (columns.top_p[rows] < 1).any():
            keep_nucleus(scaled, self._column(columns.top_p[rows]))
        return draw_from(scaled, self._column(uniforms(columns.seed[rows], positions.astype(np.uint64))))

    def _column(self, values: np.ndarray[tuple[int], np.dtype[np.number]]) -> Tensor:
        return torch.from_numpy(values).to(self._device.torch_device)[:, None]
