"""A linear for each head: y[t, h] = W[h] x[t, h].

make(weight, linear) -> PerHead. The weight [H, N, K] is in the model's dtype; `linear` makes a Linear of one head's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from millrace.ops.base.version import Version
from millrace.ops.cpp.native import DTYPES, native, native_missing
from millrace.ops.linear.dense import Linear, addresses_of
from millrace.ops.triton import triton_missing

PerHead = Callable[[Tensor], Tensor]
"""[T, H, K] -> [T, H, N]"""
MakeLinear = Callable[[Any, Tensor | None], Linear]


class LoopPerHead:
    """The reference: one head after the other, each as the linear that was chosen for this device."""

    def __init__(self, weight: Tensor, linear: MakeLinear) -> None:
        self._heads = [linear(head.contiguous(), None) for head in weight]

    def __call__(self, x: Tensor) -> Tensor:
        return torch.stack([head(x[:, index].contiguous()) for index, head in enumerate(self._heads)], dim=1)


class NativePerHead(LoopPerHead):
    """All heads in one call, in C++, if their linears are; else as the reference."""

    def __init__(self, weight: Tensor, linear: MakeLinear) -> None:
        super().__init__(weight, linear)
        self._out_features, self._table = weight.shape[1], addresses_of(self._heads)
        self._call = native().without_gil.per_head

    def __call__(self, x: Tensor) -> Tensor:
        if self._table is None:
            return super().__call__(x)
        x = x.contiguous()
        out = x.new_empty((*x.shape[:2], self._out_features))
        self._call(self._table, x.shape[1], x.data_ptr(), out.data_ptr(), x.shape[0])
        return out


class BatchedPerHead:
    """Few rows: one kernel that waits for nothing but x. More: torch's batched product."""

    def __init__(self, weight: Tensor, linear: MakeLinear) -> None:
        from millrace.ops.triton.gemm import per_head  # slow to import

        self._weight = weight.mT.contiguous()
        self._few, self._max_rows = per_head.per_head, per_head.MAX_ROWS if weight.shape[2] <= per_head.TILE else 0

    def __call__(self, x: Tensor) -> Tensor:
        if 0 < x.shape[0] <= self._max_rows and x.stride(2) == 1:
            return self._few(x, self._weight)
        return torch.bmm(x.transpose(0, 1), self._weight).transpose(0, 1)


VERSIONS = (
    Version(
        op="per_head_linear",
        name="batched",
        make=BatchedPerHead,
        when="all heads at once: a Triton kernel for few rows, else torch's batched matrix product",
        devices=("cuda",),
        missing=triton_missing,
    ),
    Version(
        op="per_head_linear",
        name="native",
        make=NativePerHead,
        when="C++: all heads in one call",
        devices=("cpu",),
        dtypes=tuple(DTYPES),
        invariant_on=("cpu",),
        missing=native_missing,
    ),
    Version(
        op="per_head_linear",
        name="loop",
        make=LoopPerHead,
        when="the reference: one head after the other, by the version of `linear` for this device",
        invariant_on=("cpu", "cuda"),
    ),
)
