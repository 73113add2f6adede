"""grouped_linear on a GPU over weights in planes of codes: as many bytes as in the file, read by the matrix
instruction. Formats and sizes that do not fit go to the version `triton`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from millrace.ops.linear.block_weight import BlockWeight
from millrace.ops.linear.dense import Head
from millrace.ops.linear.grouped_weight import GroupedWeight

if TYPE_CHECKING:
    from millrace.ops.triton.blocks.planes import PlaneKind, PlanesWeight

DTYPES = (torch.bfloat16, torch.float16)


def kind_of(weight: GroupedWeight | BlockWeight) -> PlaneKind | None:
    """How the weight lies in planes; None if it does not."""
    from millrace.ops.triton.blocks import planes  # slow to import

    if weight.dtype not in DTYPES:
        kind = None
    elif isinstance(weight, BlockWeight):
        kind = planes.KINDS.get(weight.kind)
    elif _has_levels(weight):
        assert weight.levels is not None
        scales = {
            (torch.float8_e8m0fnu, 32): planes.POWER,
            (torch.float16, 32): planes.HALF,
            (torch.float32, 64): planes.FLOAT,
            (torch.float8_e4m3fn, 16): planes.FP8,
        }.get((weight.scales.dtype, weight.group))
        if (weight.output_scales is None) == (scales == planes.FP8):
            scales = None
        levels = tuple(weight.levels.tolist())
        kind = None if scales is None else planes.PlaneKind(weight.group, 0, 0, scales, levels)
    else:
        kind = planes.KINDS["Q8_0"] if _is_q8(weight) else None
    return kind if planes.fits(kind, *weight.shape) else None


def _has_levels(weight: GroupedWeight) -> bool:
    parts = (weight.zeros, weight.offsets, weight.order)
    is_plain = all(part is None for part in parts) and weight.zero == 0 and weight.rows_per_scale == 1
    return is_plain and weight.levels is not None and weight.bits == 4


def _is_q8(weight: GroupedWeight) -> bool:
    """True for signed bytes with a scale of float16 for each 32, as Q8_0 has them."""
    parts = (weight.zeros, weight.levels, weight.offsets, weight.output_scales, weight.order)
    is_plain = all(part is None for part in parts) and weight.zero == 0 and not weight.int8_inputs
    has_scales = weight.group == 32 and weight.rows_per_scale == 1 and weight.scales.dtype == torch.float16
    return is_plain and has_scales and weight.codes.dtype == torch.int8


class PlanesLinear(Head):
    """Few rows: a kernel that makes numbers of codes in registers. More: the weight dequantised in every call."""

    def __init__(self, weight: GroupedWeight | BlockWeight, bias: Tensor | None = None) -> None:
        from millrace.ops.triton.blocks import few_rows, plane_rows

        self.weight, self.bias = in_planes(weight), bias
        self.num_bytes = self.weight.num_bytes + (0 if bias is None else bias.nbytes)
        self._few, self._dequantise = few_rows.multiply, few_rows.dequantise
        self._take_rows = plane_rows.rows_of_planes
        self._choose, self._max_rows = few_rows.choose_tiles, few_rows.MAX_ROWS

    def __call__(self, x: Tensor) -> Tensor:
        return self._multiply(x, x.dtype)

    def wide(self, x: Tensor, out: Tensor | None = None, decode: bool = False) -> Tensor:
        return self._multiply(x, torch.float32)

    def _multiply(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        rows = x.shape[0]
        if rows <= self._max_rows:
            return self._few(x, self.weight, self._choose(rows, self.weight), self.bias, dtype)
        return F.linear(x, self._dequantise(self.weight), self.bias).to(dtype)

    def take_rows(self, ids: Tensor) -> Tensor:
        """int64 [T] -> [T, K], of a weight without levels."""
        return self._take_rows(self.weight, ids)


def in_planes(weight: GroupedWeight | BlockWeight) -> PlanesWeight:
    """The same weight in planes; `kind_of` says that it fits."""
    from millrace.ops.triton.blocks import planes

    if isinstance(weight, BlockWeight):
        return planes.pack(weight.kind, weight.blocks, weight.in_features, weight.dtype)
    if weight.levels is None:
        return planes.pack("Q8_0", _q8_blocks(weight), weight.in_features, weight.dtype)
    kind = kind_of(weight)
    assert kind is not None
    return planes.pack_levels(weight.codes, weight.scales, weight.output_scales, kind, weight.dtype)


def _q8_blocks(weight: GroupedWeight) -> Tensor:
    """The blocks of the file."""
    outputs, inputs = weight.shape
    scales = weight.scales.contiguous().view(torch.uint8).view(outputs, inputs // 32, 2)
    codes = weight.codes.view(torch.uint8).view(outputs, inputs // 32, 32)
    return torch.cat((scales, codes), dim=2).view(outputs, -1)
