"""Draws the next token of every row whose last known token was computed.

Order, per row: grammar mask, logit bias, minimum length, penalties, then temperature, top-k, min-p, top-p, and one draw
by inverting the cumulative distribution at a uniform number keyed by (seed, position). Greedy rows skip everything from
temperature on. Log-probabilities are those of the raw logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from millrace.ops.head.draw import NativeDraw, native_missing
from millrace.params import RowParams
from millrace.plan.step import Int32s, Int64s, StepPlan
from millrace.run.device.device import Device
from millrace.run.sampling.logprobs import LogprobColumns, score
from millrace.run.sampling.masks import Masks, apply_masks
from millrace.run.sampling.noise import uniforms
from millrace.run.sampling.penalties import Penalties
from millrace.run.sampling.row_params import RowParamTable
from millrace.run.table.request_table import RequestTable

NUCLEUS_GUESS = 512
"""Tokens sorted first in the search for a top-p threshold on a CPU."""


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
        self._draw_native = NativeDraw() if has_native else None
        self.row_params = RowParamTable(max_rows=max_rows, vocab_size=vocab_size)

    def update(self, plan: StepPlan) -> None:
        for release in plan.released:
            self._penalties.release(release.row)
        for admission in plan.admitted:
            if self.row_params.admit(admission).has_penalties:
                self._penalties.admit(admission)
            else:
                self._penalties.release(admission.row)

    def draw(self, logits: Tensor, rows: Int32s, positions: Int32s, masks: Masks | None = None) -> Drawn:
        """`logits` float32 [n, vocab], may be overwritten; `positions`: those of the new tokens."""
        num_logprobs = self.row_params.num_logprobs[rows]
        scored = np.flatnonzero(num_logprobs >= 0)
        raw = logits[torch.from_numpy(scored).to(logits.device)] if len(scored) else None
        if masks is not None and self._draw_native is not None:
            self._draw_native.mask(logits, masks.index, masks.bits)
        elif masks is not None:
            apply_masks(logits, masks)
        self._constrain(logits, rows, positions)
        tokens = self._choose(logits, rows, positions)
        for index in np.flatnonzero(self.row_params.has_penalties[rows]).tolist():
            self._penalties.count(int(rows[index]), tokens[index])
        logprobs = None
        if raw is not None:
            num_top = max(1, int(num_logprobs[scored].max()))
            logprobs = score(raw, tokens[torch.from_numpy(scored).to(tokens.device)], num_top)
        return Drawn(tokens, logprobs, scored, num_logprobs[scored])

    def _constrain(self, logits: Tensor, rows: Int32s, positions: Int32s) -> None:
        """Apply bias, minimum length and penalties to the few rows that have them."""
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
                self._penalties.apply(logits, index, row, row_params.params)

    def _add_bias(self, logits: Tensor, index: int, row_params: RowParams) -> None:
        token_ids, biases = zip(*row_params.params.logit_bias, strict=True)
        device = logits.device
        logits[index].index_add_(0, torch.tensor(token_ids, device=device), torch.tensor(biases, device=device))

    def _choose(self, logits: Tensor, rows: Int32s, positions: Int32s) -> Tensor:
        columns = self.row_params
        if self._draw_native is not None:
            limits = (columns.temperature[rows], columns.top_k[rows], columns.top_p[rows], columns.min_p[rows])
            return self._draw_native(logits, *limits, uniforms(columns.seed[rows], positions.astype(np.uint64)))
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
        self._keep_top_k(scaled, columns.top_k[rows])
        if (columns.min_p[rows] > 0).any():
            floor = scaled.amax(dim=-1, keepdim=True) + torch.log(self._column(columns.min_p[rows]))
            scaled.masked_fill_(scaled < floor, -torch.inf)
        if (columns.top_p[rows] < 1).any():
            _keep_nucleus(scaled, self._column(columns.top_p[rows]))
        cumulative = torch.softmax(scaled, dim=-1).double().cumsum(dim=-1)
        noise = uniforms(columns.seed[rows], positions.astype(np.uint64))
        target = self._column(noise) * cumulative[:, -1:]
        return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_(max=logits.shape[1] - 1)

    def _keep_top_k(self, scaled: Tensor, top_k: Int64s) -> None:
        largest = int(top_k.max())
        if largest == 0:
            return
        values = scaled.topk(largest, dim=-1).values
        last = torch.from_numpy(np.maximum(top_k - 1, 0)).to(scaled.device)[:, None]
        floor = values.gather(1, last)
        unlimited = torch.from_numpy(top_k == 0).to(scaled.device)[:, None]
        scaled.masked_fill_((scaled < floor) & ~unlimited, -torch.inf)

    def _column(self, values: np.ndarray[tuple[int], np.dtype[np.floating]]) -> Tensor:
        return torch.from_numpy(values).to(self._device.torch_device)[:, None]


def _keep_nucleus(scaled: Tensor, top_p: Tensor) -> None:
    """Mask all but the smallest set of most likely tokens whose probabilities sum to `top_p`; ties at the edge stay."""
    probs = torch.softmax(scaled, dim=-1)
    floor = _nucleus_floor(probs, top_p)
    scaled.masked_fill_(probs < floor, -torch.inf)


def _nucleus_floor(probs: Tensor, top_p: Tensor) -> Tensor:
    vocab_size = probs.shape[1]
    if probs.device.type != "cpu" or vocab_size <= NUCLEUS_GUESS:
        return _edge(probs.sort(dim=-1, descending=True).values, top_p)
    guess = probs.topk(NUCLEUS_GUESS, dim=-1).values
    floor = _edge(guess, top_p)
    short = guess.sum(dim=-1) < top_p[:, 0]
    if short.any():
        floor[short] = _edge(probs[short].sort(dim=-1, descending=True).values, top_p[short])
    return floor


def _edge(descending: Tensor, top_p: Tensor) -> Tensor:
    """The probability of the last token needed to reach `top_p`."""
    before = descending.double().cumsum(dim=-1) - descending.double()
    needed = (before < top_p).sum(dim=-1, keepdim=True).clamp_(min=1)
    return descending.gather(1, needed - 1)
