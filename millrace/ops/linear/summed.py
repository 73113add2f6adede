"""A linear layer whose inputs are split over the ranks of a mesh: every rank has some of the columns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from millrace.ops.base.mesh import Mesh
from millrace.ops.linear.dense import Head, Linear


class SummedLinear(Linear):
    """Multiplies this rank's columns and sums over the ranks, in float32, rounded once. `adds` is False: the sum comes
    before the residual."""

    def __init__(self, own: Linear, mesh: Mesh, dtype: torch.dtype) -> None:
        """A bias belongs to one rank; the others have zeros."""
        self._own, self._mesh, self._dtype = own, mesh, dtype
        self.num_bytes, self.has_decode_kernel = own.num_bytes, own.has_decode_kernel

    def __call__(self, x: Any) -> Tensor:
        return self._mesh.sum(self._product(x, decode=False)).to(self._dtype)

    def decode(self, x: Any) -> Tensor:
        return self._mesh.sum(self._product(x, decode=True)).to(self._dtype)

    def _product(self, x: Any, *, decode: bool) -> Tensor:
        if isinstance(self._own, Head):
            return self._own.wide(x, decode=decode)
        return (self._own.decode(x) if decode else self._own(x)).float()
