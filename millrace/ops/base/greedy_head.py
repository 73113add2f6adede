"""An LM head that draws greedily without writing logits, and where it writes the drawn tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor


@dataclass(frozen=True, slots=True)
class DrawnTokens:
    """Where to write the tokens drawn from T hidden states. All tensors are on the device."""

    rows: Tensor
    """int32 [T]: table row of each hidden state; negative for padding, whose token is not written."""
    out: Tensor
    """Receives the tokens, starting at the index in `out_start` [1]."""
    out_start: Tensor
    last_tokens: Tensor
    """[table rows]: also receives each token, at its table row."""


@runtime_checkable
class GreedyHead(Protocol):
    """An LM head that can find the highest logit of each row without writing the others."""

    def draws(self, rows: int) -> bool:
        """True if `draw` is faster for this number of rows than computing logits and argmax."""
        ...

    def draw(self, x: Tensor, vocab_size: int, to: DrawnTokens) -> None:
        """Draw the first token with the highest logit, among the first `vocab_size`, for each row of x. Only if `draws`
        returned true."""
        ...
