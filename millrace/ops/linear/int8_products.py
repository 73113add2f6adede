"""A linear on a GPU for checkpoints of INT8 weights and INT8 activations (W8A8)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from millrace.ops.base.capability import capability
from millrace.ops.linear.dense import Head
from millrace.ops.linear.grouped_weight import GroupedWeight


def multiplies_int8(weight: GroupedWeight) -> bool:
    """True if the rows of such a weight's inputs may be rounded to INT8, and products of integers give its numbers."""
    is_symmetric = weight.zeros is None and weight.zero == 128 and weight.levels is None and weight.offsets is None
    is_whole = weight.group >= weight.in_features and weight.rows_per_scale == 1 and weight.output_scales is None
    return weight.int8_inputs and weight.bits == 8 and is_symmetric and is_whole and weight.order is None


class Int8Products(Head):
    """Each row is rounded to INT8 with a scale, however many there are, and integers are multiplied."""

    def __init__(self, weight: GroupedWeight, bias: Tensor | None = None) -> None:
        from millrace.ops.triton.gemm import int8_rows

        signed = (weight.codes ^ 128).view(torch.int8)
        self.weight, self.bias = replace(weight, codes=signed, zero=0), bias
        self._product, self._scales = int8_rows, weight.scales.view(-1)
        self._is_large = weight.codes.is_cuda and capability(weight.codes.device) >= (9, 0)
        self.num_bytes = weight.num_bytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        return self._multiplied(x, x.dtype)

    def wide(self, x: Tensor, out: Tensor | None = None, decode: bool = False) -> Tensor:
        return self._multiplied(x, torch.float32)

    def _multiplied(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        tiles = self._product.choose_tiles(x.shape[0], *self.weight.shape, self._is_large)
        return self._product.multiply(x, self.weight.codes, self._scales, tiles, self.bias, dtype)
