"""grouped_linear on a GPU over packed 4-bit codes: nothing is dequantised except in registers.

Weights that these kernels do not take (other bits, levels, odd sizes) go to the version `triton`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from millrace.ops.base.capability import capability
from millrace.ops.base.version import Version
from millrace.ops.linear.block_planes import PlanesLinear, kind_of
from millrace.ops.linear.block_weight import BlockWeight, ThinPlanesLinear, is_thin
from millrace.ops.linear.dense import Head
from millrace.ops.linear.fp8_groups import Fp8Groups, multiplies_fp8
from millrace.ops.linear.grouped import by_parts, make_triton
from millrace.ops.linear.grouped_weight import GroupedWeight
from millrace.ops.linear.int8_products import Int8Products, multiplies_int8
from millrace.ops.triton import gluon_missing, triton_missing

if TYPE_CHECKING:
    from millrace.ops.triton.grouped.layout import PackedCodes

MIN_CAPABILITY = (8, 0)
"""First compute capability with the matrix instruction for bfloat16."""


def can_pack(weight: GroupedWeight) -> bool:
    """True if the kernels read such a weight: 4-bit codes, one scale per output and group."""
    from millrace.ops.triton.grouped.layout import OFFSETS, fits  # slow to import

    is_plain = weight.levels is None and weight.output_scales is None and weight.offsets is None
    is_plain = is_plain and weight.rows_per_scale == 1 and weight.scales.dtype.itemsize > 1
    return weight.bits == 4 and is_plain and weight.dtype in OFFSETS and fits(*weight.shape, weight.group)


def packed(weight: GroupedWeight) -> PackedCodes:
    from millrace.ops.triton.grouped.layout import pack

    scales = weight.scales
    zeros = torch.full_like(scales, weight.zero, dtype=torch.uint8) if weight.zeros is None else weight.zeros
    return pack(weight.codes, scales, zeros, weight.group, weight.dtype)


class PackedCodesLinear(Head):
    """By number of rows: a kernel that reads codes into registers, one that feeds Hopper's warpgroup instruction, or
    the weight dequantised and torch's linear."""

    def __init__(self, weight: GroupedWeight, bias: Tensor | None = None) -> None:
        from millrace.ops.triton.gemm.product import new_counters
        from millrace.ops.triton.grouped import choice, few_rows, layout

        self.weight, self.bias, self._order = packed(weight), bias, weight.order
        self.num_bytes = self.weight.num_bytes + (0 if bias is None else bias.nbytes)
        self._few_tiles, self._many_tiles = choice.few_tiles, choice.many_tiles
        self._few, self._dequantise = few_rows.multiply, layout.dequantise
        self.counters = new_counters(choice.MAX_COUNTERS, weight.codes.device)
        self._is_hopper = not gluon_missing(weight.codes.device)

    def __call__(self, x: Tensor) -> Tensor:
        return self._multiply(x, x.dtype)

    def wide(self, x: Tensor, out: Tensor | None = None, decode: bool = False) -> Tensor:
        return self._multiply(x, torch.float32)

    def _multiply(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        if self._order is not None:
            x = x[:, self._order]
        rows = x.shape[0]
        few = self._few_tiles(rows, self.weight)
        if few is not None:
            return self._few(x, self.weight, few, self.bias, dtype)
        many = self._many_tiles(rows, self.weight) if self._is_hopper else None
        if many is None:
            return F.linear(x, self._dequantise(self.weight), self.bias).to(dtype)
        from millrace.ops.triton.grouped.many_rows import multiply  # slow to import

        return multiply(x, self.weight, many, self.counters, self.bias, dtype)


def make_packed(weight: GroupedWeight | BlockWeight, bias: Tensor | None = None) -> Head:
    if isinstance(weight, GroupedWeight) and can_pack(weight):
        return PackedCodesLinear(weight, bias)
    if isinstance(weight, GroupedWeight) and multiplies_int8(weight):
        return Int8Products(weight, bias)
    if isinstance(weight, GroupedWeight) and multiplies_fp8(weight):
        return Fp8Groups(weight, bias)
    if kind_of(weight) is not None:
        return PlanesLinear(weight, bias)
    if is_thin(weight):
        return ThinPlanesLinear(weight, bias)
    return make_triton(weight, bias)


def packed_missing(device: torch.device) -> str:
    if device.type != "cuda" or not torch.cuda.is_available():
        return "needs a GPU"
    if capability(device) < MIN_CAPABILITY:
        return "needs compute capability 8.0"
    return triton_missing(device)


VERSIONS = (
    Version(
        op="grouped_linear",
        name="packed",
        make=by_parts(make_packed),
        when="Gluon kernels over packed 4-bit codes and planes of codes, by number of rows; many"
        " rows of W8A8 checkpoints as integers, of blocks of FP8 as FP8; other codes as in `triton`",
        devices=("cuda",),
        dtypes=(torch.bfloat16, torch.float16),
        missing=packed_missing,
    ),
)
