"""The ranks that compute one model together, as the ops see them: this rank's place, sums and gathers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

T = TypeVar("T")


class Mesh:
    """The only rank of a model that is not split. A mesh of several ranks overrides everything."""

    rank = 0
    size = 1

    def step(self, work: Callable[[], T]) -> T:
        """Run work that every rank runs, with the same sums and gathers in the same order. Its exception is raised
        if it fails on every rank; a failure on some of them breaks the mesh."""
        return work()

    def sum(self, x: Tensor) -> Tensor:
        """float32, of the same shape on every rank. Every rank gets the same bits: ranks are added in their order."""
        return x

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """float32 [n, own width] of each rank, side by side."""
        return x


ONE_RANK = Mesh()
"""It has no state."""
