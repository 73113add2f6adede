"""The forward passes of drafters on a CPU, in C++."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from millrace.models.drafters.program import EagleDrafter
from millrace.plan.step import Int32s
from millrace.run.cpu.native_step import NativeStep
from millrace.run.drafting.chain import DraftInputs, DraftPass, PassStates
from millrace.run.drafting.passes import UNKNOWN


class NativeDraftPass(DraftPass):
    no_states = None

    def __init__(self, step: NativeStep, vocab_size: int) -> None:
        self._step = step
        self._vocab_size = vocab_size

    def forward(self, inputs: DraftInputs) -> PassStates:
        rows, tokens = inputs.rows, self._known(inputs.tokens)
        draws = np.ones(len(rows), np.int32)
        return PassStates(self._step.forward_rows(rows, inputs.starts, inputs.counts, draws, tokens), None)

    def write(self, inputs: DraftInputs) -> None:
        none = np.zeros(len(inputs.rows), np.int32)
        self._step.forward_rows(inputs.rows, inputs.starts, inputs.counts, none, self._known(inputs.tokens))

    def _known(self, tokens: Int32s) -> Int32s:
        return np.where(tokens < self._vocab_size, tokens, np.int32(UNKNOWN))

    def fuse(self, states: Tensor) -> Tensor:
        return states

    def draw(self, states: PassStates, rows: Int32s, positions: Int32s) -> Int32s:
        return _drawn(self._step, states, rows, positions)


class NativeEaglePass(DraftPass):
    """A feature drafter; see `EaglePass`, which has the same result, bit for bit."""

    def __init__(self, drafter: EagleDrafter, step: NativeStep, dtype: torch.dtype) -> None:
        self._drafter = drafter
        self._step = step
        self._token_ids = None if drafter.token_ids.ids is None else drafter.token_ids.ids.numpy().astype(np.int32)
        self.no_states = torch.zeros((0, drafter.spec.hidden_size), dtype=dtype)

    def fuse(self, states: Tensor) -> Tensor:
        return self._drafter.fuse(states)

    def forward(self, inputs: DraftInputs) -> PassStates:
        for_head, hidden = self._forward(inputs, np.ones(len(inputs.rows), np.int32))
        return PassStates(for_head, for_head if self._drafter.spec.returns_normed else hidden)

    def write(self, inputs: DraftInputs) -> None:
        self._forward(inputs, np.zeros(len(inputs.rows), np.int32))

    def _forward(self, inputs: DraftInputs, draws: Int32s) -> tuple[Tensor, Tensor]:
        assert inputs.states is not None
        tokens = np.ascontiguousarray(inputs.tokens)
        return self._step.forward_pairs(inputs.rows, inputs.starts, inputs.counts, draws, tokens, inputs.states)

    def draw(self, states: PassStates, rows: Int32s, positions: Int32s) -> Int32s:
        drawn = _drawn(self._step, states, rows, positions)
        return drawn if self._token_ids is None else self._token_ids[drawn]


def _drawn(step: NativeStep, states: PassStates, rows: Int32s, positions: Int32s) -> Int32s:
    # The rows' last tokens are those of the target.
    none_is_last = np.zeros(len(rows), np.bool_)
    return step.draw(states.for_head, rows, positions, is_last=none_is_last).numpy().astype(np.int32)
