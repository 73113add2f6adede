"""The sampling parameters of every row as columns: the one place that gives a request's parameters their meaning.

The CPU's sampler and native step read the columns; the GPU's records are filled from `RowValues`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from millrace.plan.step import Admission


class RowValues(NamedTuple):
    temperature: float
    """0 is greedy."""
    top_k: int
    """0 keeps every token."""
    top_p: float
    min_p: float
    ends_from: int
    """Position from which end tokens may be drawn; 0 without a minimum length."""
    num_logprobs: int
    """Top tokens requested beside the chosen one; -1 for no log-probabilities."""
    has_bias: bool
    has_penalties: bool
    """Of the whole context, counted by token. Those of a shaped row are computed from its tokens instead."""
    is_shaped: bool
    """True for rows that `shaped_rows.py` draws."""
    needs_logits: bool
    """`DrawParams.needs_logits`."""
    seed: int
    """64 bits. The last field, because it differs between requests that are equal otherwise."""

    @property
    def is_adjusted(self) -> bool:
        """True for rows whose logits may be changed or scored: more than a draw."""
        return self.has_bias or self.has_penalties or self.is_shaped or self.ends_from > 0 or self.num_logprobs >= 0


def row_values(admission: Admission, vocab_size: int) -> RowValues:
    params = admission.row_params.params
    is_shaped, has_ends = params.is_shaped, admission.row_params.has_late_ends
    return RowValues(
        temperature=0.0 if params.is_greedy else params.temperature,
        top_k=params.top_k if params.top_k < vocab_size else 0,
        top_p=params.top_p,
        min_p=params.min_p,
        ends_from=admission.num_prompt + params.min_tokens if has_ends else 0,
        num_logprobs=-1 if params.logprobs is None else params.logprobs,
        has_bias=bool(params.logit_bias),
        has_penalties=params.uses_penalties and not is_shaped,
        is_shaped=is_shaped,
        needs_logits=params.needs_logits,
        seed=(params.seed or 0) & (2**64 - 1),
    )


class RowParamTable:
    """`RowValues` of every row, as columns."""

    def __init__(self, *, max_rows: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._values: list[RowValues | None] = [None] * max_rows
        self.num_needing = self.num_adjusted = 0
        """Rows whose last request needs logits, and those whose last request is adjusted."""
        self.temperature = np.zeros(max_rows, np.float32)
        self.top_k = np.zeros(max_rows, np.int64)
        self.top_p = np.ones(max_rows, np.float32)
        self.min_p = np.zeros(max_rows, np.float32)
        self.seed = np.zeros(max_rows, np.uint64)
        self.ends_from = np.zeros(max_rows, np.int32)
        self.num_logprobs = np.full(max_rows, -1, np.int32)
        self.has_bias = np.zeros(max_rows, np.bool_)
        self.has_penalties = np.zeros(max_rows, np.bool_)
        self.is_shaped = np.zeros(max_rows, np.bool_)
        self.needs_logits = np.zeros(max_rows, np.bool_)
        self.is_adjusted = np.zeros(max_rows, np.bool_)

    def admit(self, admission: Admission) -> RowValues:
        row, values = admission.row, row_values(admission, self._vocab_size)
        self.seed[row] = values.seed
        before, self._values[row] = self._values[row], values
        if before is not None and before[:-1] == values[:-1]:
            return values  # Most requests differ from the one before only in their seed.
        self.temperature[row] = values.temperature
        self.top_k[row] = values.top_k
        self.top_p[row] = values.top_p
        self.min_p[row] = values.min_p
        self.ends_from[row] = values.ends_from
        self.num_logprobs[row] = values.num_logprobs
        self.has_bias[row] = values.has_bias
        self.has_penalties[row] = values.has_penalties
        self.is_shaped[row] = values.is_shaped
        if before is not None:
            self.num_needing -= before.needs_logits
            self.num_adjusted -= before.is_adjusted
        self.num_needing += values.needs_logits
        self.num_adjusted += values.is_adjusted
        self.needs_logits[row] = values.needs_logits
        self.is_adjusted[row] = values.is_adjusted
        return values
