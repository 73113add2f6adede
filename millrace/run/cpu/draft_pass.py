"""The forward pass of a draft model on a CPU, in C++."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from millrace.plan.step import Int32s
from millrace.run.cpu.native_step import NativeStep
from millrace.run.drafting.chain import DraftInputs, DraftPass, DraftStates
from millrace.run.drafting.passes import UNKNOWN


class NativeDraftPass(DraftPass):
    no_states = None

    def __init__(self, step: NativeStep, vocab_size: int) -> None:
        self._step, self._vocab_size = step, vocab_size

    def forward(self, inputs: DraftInputs) -> DraftStates:
        rows, tokens = inputs.rows, np.where(inputs.tokens < self._vocab_size, inputs.tokens, np.int32(UNKNOWN))
        draws = np.ones(len(rows), np.int32)
        return DraftStates(self._step.forward_rows(rows, inputs.starts, inputs.counts, draws, tokens), None)

    def fuse(self, states: Tensor) -> Tensor:
        return states

    def draw(self, states: DraftStates, rows: Int32s, positions: Int32s) -> Int32s:
        # The rows' last tokens are those of the target.
        none_is_last = np.zeros(len(rows), np.bool_)
        return self._step.draw(states.for_head, rows, positions, is_last=none_is_last).numpy().astype(np.int32)
