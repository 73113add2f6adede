"""Draws the next token of every row whose last known token was computed.

Order, per row: logit bias, minimum length, penalties, then temperature, top-k, min-p, top-p, and one draw by inverting
the cumulative distribution at a uniform number keyed by (seed, position). Greedy rows skip everything from temperature
on. Log-probabilities are those of the raw logits.
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
from millrace.run.sampling.noise import uniforms
from millrace.run.sampling.penalties import Penalties, uses_penalties
from millrace.run.table.request_table import RequestTable

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them would overflow."""
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
        self._vocab_size = vocab_size
        has_native = device.kind == "cpu" and not native_missing(device.torch_device)
        self._draw_native = NativeDraw() if has_native else None
        self.temperature = np.zeros(max_rows, np.float32)
        self.top_k = np.zeros(max_rows, np.int64)
        self.top_p = np.ones(max_rows, np.float32)
        self.min_p = np.zeros(max_rows, np.float32)
        self.seed = np.zeros(max_rows, np.uint64)
        self.num_logprobs = np.full(max_rows, -1, np.int32)
        self.ends_from = np.zeros(max_rows, np.int32)
        """Position from which end tokens may be drawn."""
        self.has_bias = np.zeros(max_rows, np.bool_)
        self.has_penalties = np.zeros(max_rows, np.bool_)
        self.is_special = np.zeros(max_rows, np.bool_)
        """Rows with a bias, penalties, a minimum length or log-probabilities: the native step cannot run them."""

    def update(self, plan: StepPlan) -> None:
        for release in plan.released:
            self._penalties.release(release.row)
        for admission in plan.admitted:
            row, params = admission.row, self._table.params[admission.row].params
            self.temperature[row] = 0.0 if params.temperature < GREEDY_BELOW else params.temperature
            self.top_k[row] = params.top_k if params.top_k < self._vocab_size else 0
            self.top_p[row] = params.top_p
            self.min_p[row] = params.min_p
            self.seed[row] = (params.seed or 0) & (2**64 - 1)
            self.num_logprobs[row] = -1 if params.logprobs is None else params.logprobs
            self.ends_from[row] = admission.num_prompt + params.min_tokens
            self.has_bias[row] = bool(params.logit_bias)
            self.has_penalties[row] = uses_penalties(params)
            self.is_special[row] = (
                self.has_bias[row] or self.has_penalties[row] or params.min_tokens > 0 or params.logprobs is not None
            )
            if self.has_penalties[row]:
                self._penalties.admit(admission)
            else:
                self._penalties.release(row)

    def draw(self, logits: Tensor, rows: Int32s, positions: Int32s) -> Drawn:
        """`logits` float32 [n, vocab], may be overwritten; `positions`: those of the new tokens."""
        scored = np.flatnonzero(self.num_logprobs[rows] >= 0)
        raw = logits[torch.from_numpy(scored).to(logits.device)] if len(scored) else None
        self._constrain(logits, rows, positions)
        tokens = self._choose(logits, rows, positions)
        for index in np.flatnonzero(self.has_penalties[rows]).tolist():
            self._penalties.count(int(rows[index]), tokens[index])
        logprobs = None
        if raw is not None:
            num_top = max(1, int(self.num_logprobs[rows[scored]].max()))
            logprobs = score(raw, tokens[torch.from_numpy(scored).to(tokens.device)], num_top)
        return Drawn(tokens, logprobs, scored, self.num_logprobs[rows[scored]])

    def _constrain(self, logits: Tensor, rows: Int32s, positions: Int32s) -> None:
        """Apply bias, minimum length and penalties to the few rows that have them."""
        early = positions < self.ends_from[rows]
        touched = self.has_bias[rows] | self.has_penalties[rows] | early
        for index in np.flatnonzero(touched).tolist():
            row = int(rows[index])
            row_params = self._table.params[row]
            if self.has_bias[row]:
                self._add_bias(logits, index, row_params)
            if early[index] and row_params.end_token_ids:
                logits[index, torch.tensor(row_params.end_token_ids, device=logits.device)] = -torch.inf
            if self.has_penalties[row]:
                self._penalties.apply(logits, index, row, row_params.params)

    def _add_bias(self, logits: Tensor, index: int, row_params: RowParams) -> None:
        token_ids, biases = zip(*row_params.params.logit_bias, strict=True)
        device = logits.device
        logits[index].index_add_(0, torch.tensor(token_ids, device=device), torch.tensor(biases, device=device))

    def _choose(self, logits: Tensor, rows: Int32s, positions: Int32s) -> Tensor:
        if self._draw_native is not None:
            limits = (self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows])
            return self._draw_native(logits, *limits, uniforms(self.seed[rows], positions.astype(np.uint64)))
        random = np.flatnonzero(self.temperature[rows] > 0)
        if len(random) == 0:
            return logits.argmax(dim=-1)
        if len(random) == len(rows):
            return self._draw_random(logits, rows, positions)
        tokens = logits.argmax(dim=-1)
        index = torch.from_numpy(random).to(logits.device)
        tokens[index] = self._draw_random(logits[index], rows[random], positions[random])
        return tokens

    def _draw_random(self, logits: Tensor, rows: Int32s, positions: Int32s) -> Tensor:
        temperature = self._column(self.temperature[rows])
        scaled = logits / temperature
        self._keep_top_k(scaled, self.top_k[rows])
        if (self.min_p[rows] > 0).any():
            floor = scaled.amax(dim=-1, keepdim=True) + torch.log(self._column(self.min_p[rows]))
            scaled.masked_fill_(scaled < floor, -torch.inf)
        if (self.top_p[rows] < 1).any():
            _keep_nucleus(scaled, self._column(self.top_p[rows]))
        cumulative = torch.softmax(scaled, dim=-1).double().cumsum(dim=-1)
        noise = uniforms(self.seed[rows], positions.astype(np.uint64))
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
