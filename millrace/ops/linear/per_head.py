"""A linear for each head: y[t, h] = W[h] x[t, h].

make(weight, linear) -> PerHead. The weight [H, N, K] is in the model's dtype; `linear` makes a Linear of one head's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from millrace.ops.base.version import Version
from millrace.ops.linear.dense import Linear

PerHead = Callable[[Tensor], Tensor]
"""[T, H, K] -> [T, H, N]"""
MakeLinear = Callable[[Any, Tensor | None], Linear]


class LoopPerHead:
    """The reference: one head after the other, each as the linear that was chosen for this device."""

    def __init__(self, weight: Tensor, linear: MakeLinear) -> None:
        self._heads = [linear(head.contiguous(), None) for head in weight]

    def __call__(self, x: Tensor) -> Tensor:
        return torch.stack([head(x[:, index].contiguous()) for index, head in enumerate(self._heads)], dim=1)


class BatchedPerHead:
    def __init__(self, weight: Tensor, linear: MakeLinear) -> None:
        self._weight = weight.mT.contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        return torch.bmm(x.transpose(0, 1), self._weight).transpose(0, 1)


VERSIONS = (
    Version(
        op="per_head_linear",
        name="batched",
        make=BatchedPerHead,
        when="torch's batched matrix product over all heads",
        devices=("cuda",),
    ),
    Version(
        op="per_head_linear",
        name="loop",
        make=LoopPerHead,
        when="the reference: one head after the other, by the version of `linear` for this device",
        invariant_on=("cpu", "cuda"),
    ),
)
