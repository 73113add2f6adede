"""The results of a mixture's experts before they are weighted and added: a norm after them does that as it reads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Unsummed:
    """Tokens [T, H]: each is the sum of its k weighted outputs, in float32, in their order, rounded once."""

    outputs: Tensor
    """[T k, H], a token's k one after the other."""
    weights: Tensor
    """float32 [T, k]"""
    counters: Tensor
    """Whoever adds sets these to zero, once the outputs are there. Until then nobody may call the experts again."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.weights.shape[0], self.outputs.shape[1]
