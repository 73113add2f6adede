"""A linear on a GPU for checkpoints of FP8 weights with a scale per block: its inputs are rounded to FP8 as well."""

from __future__ import annotations

import torch
from torch import Tensor

from millrace.ops.base.capability import capability
from millrace.ops.base.quantised import FP8
from millrace.ops.linear.dense import Head
from millrace.ops.linear.fp8 import FP8_CAPABILITY
from millrace.ops.linear.grouped_weight import GroupedWeight

GROUP = 128


def multiplies_fp8(weight: GroupedWeight) -> bool:
    """True if products of FP8 numbers give the products of this weight."""
    is_plain = weight.zeros is None and weight.zero == 0 and weight.levels is None and weight.offsets is None
    is_scaled = weight.group == GROUP and weight.rows_per_scale > 1 and weight.output_scales is None
    device = weight.codes.device
    is_supported = device.type != "cuda" or capability(device) >= FP8_CAPABILITY
    return weight.codes.dtype == FP8 and is_plain and is_scaled and weight.order is None and is_supported


class Fp8Groups(Head):
    def __init__(self, weight: GroupedWeight, bias: Tensor | None = None) -> None:
        from millrace.ops.triton.gemm import fp8_groups  # local: imports Triton

        self.weight, self.bias, self._product = weight, bias, fp8_groups
        device = weight.codes.device
        self._is_large = device.type == "cuda" and capability(device) >= (9, 0)
        processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        self._programs = 2 * processors
        self.num_bytes = weight.num_bytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        return self._multiplied(x, x.dtype)

    def wide(self, x: Tensor, out: Tensor | None = None, decode: bool = False) -> Tensor:
        return self._multiplied(x, torch.float32)

    def _multiplied(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        weight = self.weight
        tiles = self._product.choose_tiles(x.shape[0], *weight.shape, self._programs, self._is_large)
        return self._product.multiply(
            x, weight.codes, weight.scales, weight.rows_per_scale, tiles, self.bias, out_dtype=dtype
        )
