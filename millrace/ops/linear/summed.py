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
        self._wide, self._mesh, self._dtype = WideLinear(own), mesh, dtype
        self.num_bytes, self.has_decode_kernel = own.num_bytes, own.has_decode_kernel

    @property
    def own_part(self) -> Linear:
        return self._wide

    def total(self, own: Tensor) -> Tensor:
        return self._mesh.sum(own).to(self._dtype)

    def __call__(self, x: Any) -> Tensor:
        return self.total(self._wide(x))

    def decode(self, x: Any) -> Tensor:
        return self.total(self._wide.decode(x))


class WideLinear(Linear):
    """A linear whose result is float32."""

    def __init__(self, own: Linear) -> None:
        self._own = own
        self.num_bytes, self.has_decode_kernel = own.num_bytes, own.has_decode_kernel

    def __call__(self, x: Any) -> Tensor:
        return self._own.wide(x) if isinstance(self._own, Head) else self._own(x).float()

    def decode(self, x: Any) -> Tensor:
        return self._own.wide(x, decode=True) if isinstance(self._own, Head) else self._own.decode(x).float()
