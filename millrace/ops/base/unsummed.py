"""Outputs of a mixture's experts before they are weighted and summed: the norm that follows does both as it reads
them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Unsummed:
    """Stands for a tensor [T, H]: each token is the weighted sum of its k outputs, added in order in float32, rounded
    once."""

    outputs: Tensor
    """[T k, H]; the k outputs of a token are consecutive."""
    weights: Tensor
    """float32 [T, k]"""
    counters: Tensor
    """Reset to zero by the kernel that computes the sums. The experts must not be called again before that."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.weights.shape[0], self.outputs.shape[1]
