"""Where an LM head that draws greedily, without writing logits, writes the drawn tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class DrawnTokens:
    """Where to write the tokens drawn from T hidden states. All tensors are on the device."""

    rows: Tensor
    """int32 [T]: table row of each hidden state; negative for padding, whose token is not written."""
    out: Tensor
    """Receives the tokens: that of state i at index out_start[0] + out_index[i]."""
    out_start: Tensor
    """int32 [1]"""
    out_index: Tensor
    """int32 [T]"""
    last_tokens: Tensor
    """[table rows]: also receives each token, at its table row."""
