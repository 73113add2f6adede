"""A linear on a GPU for checkpoints of FP8 weights with a scale per block: its inputs are rounded to FP8 as well."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from millrace.ops.base.capability import capability
from millrace.ops.base.quantised import FP8
from millrace.ops.linear.dense import Head
from millrace.ops.linear.fp8 import FP8_CAPABILITY
from millrace.ops.linear.grouped_weight import GroupedWeight

GROUP, MANY_ROWS, ROWS_APART = 128, 80, 16
"""Inputs of a scale; rows from which on torch._scaled_mm is faster than our kernel, on an H200, if they are a multiple
of the last."""


def multiplies_fp8(weight: GroupedWeight) -> bool:
    """True if products of FP8 numbers give the products of this weight."""
    is_plain = weight.zeros is None and weight.zero == 0 and weight.levels is None and weight.offsets is None
    is_scaled = weight.group == GROUP and weight.rows_per_scale > 1 and weight.output_scales is None
    device = weight.codes.device
    is_supported = device.type != "cuda" or capability(device) >= FP8_CAPABILITY
    return weight.codes.dtype == FP8 and is_plain and is_scaled and weight.order is None and is_supported


@functools.cache
def takes_blocks(device: torch.device, outputs: int, inputs: int) -> bool:
    """True if torch._scaled_mm takes scales of blocks for a weight of this size, which depends on device and cuBLAS: it
    is tried. Scales of a group, and of a row of blocks, must be whole words of 16 bytes."""
    if device.type != "cuda" or capability(device) < (9, 0) or outputs % GROUP or inputs % (4 * GROUP):
        return False
    codes = torch.zeros((outputs, inputs), device=device, dtype=FP8)
    scales = torch.ones((outputs // GROUP, inputs // GROUP), device=device)
    try:
        _scaled_mm(
            codes[:1].expand(MANY_ROWS, inputs).contiguous(),
            scales.new_ones(inputs // GROUP, MANY_ROWS).t(),
            codes,
            scales,
        )
    except (RuntimeError, ValueError):
        return False
    return True


def _scaled_mm(values: Tensor, value_scales: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    out: Tensor = torch._scaled_mm(
        *(values, codes.t()), scale_a=value_scales, scale_b=scales.t(), out_dtype=torch.bfloat16
    )
    return out


class Fp8Groups(Head):
    def __init__(self, weight: GroupedWeight, bias: Tensor | None = None) -> None:
        from millrace.ops.triton.gemm import fp8_groups  # local: imports Triton
        from millrace.ops.triton.gemm.product import new_counters

        self.weight, self.bias, self._product = weight, bias, fp8_groups
        device = weight.codes.device
        self._is_large = device.type == "cuda" and capability(device) >= (9, 0)
        processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        self._programs = 2 * processors
        is_float = weight.scales.dtype == torch.float32 and weight.dtype == torch.bfloat16
        self._takes_many = weight.rows_per_scale == GROUP and is_float and takes_blocks(device, *weight.shape)
        self._counters = new_counters(fp8_groups.most_tiles(weight.shape[0]), device)
        self.num_bytes = weight.num_bytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        return self._multiplied(x, x.dtype)

    def wide(self, x: Tensor, out: Tensor | None = None, decode: bool = False) -> Tensor:
        return self._multiplied(x, torch.float32)

    def _multiplied(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        weight = self.weight
        rows = x.shape[0]
        if self._takes_many and rows >= MANY_ROWS and rows % ROWS_APART == 0 and dtype == torch.bfloat16:
            out = _scaled_mm(*self._product.round_groups(x, rows_side_by_side=True), weight.codes, weight.scales)
            return out if self.bias is None else out.add_(self.bias)
        tiles = self._product.choose_tiles(rows, *weight.shape, self._programs, self._is_large)
        return self._product.multiply(
            x, weight.codes, weight.scales, weight.rows_per_scale, tiles, self._counters, self.bias, dtype
        )
