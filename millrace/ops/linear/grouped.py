"""A linear layer over a weight of small codes with a scale per group of inputs, as quantised checkpoints store it.

make(weight, bias) -> Linear. `weight` is a `GroupedWeight`, or a sequence of weights whose outputs follow each other: a
fused matrix with parts that cannot be joined, some of them perhaps plain Tensors. A weight's value is its dequantised
number rounded to the model's dtype. No version keeps a dequantised copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from millrace.errors import ModelError
from millrace.ops.base.version import Version
from millrace.ops.linear.dense import TILE_ROWS, Head, PlainLinear, TiledLinear
from millrace.ops.linear.fp8 import FP8_CAPABILITY
from millrace.ops.triton import triton_missing

_SLICE_ITEMS = 1 << 22
"""Weights dequantised at a time by the reference."""


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """A weight [N, K]: value = level * scale * output scale + offset, where level is `levels[code]` or
    `code - zero`."""

    codes: Tensor
    """4 bits: uint8 [N, K / 2], even inputs in the low halves. 8 bits: uint8, int8 or float8_e4m3fn [N, K]."""
    scales: Tensor
    """[N / rows per scale, K / group], each rounded up, in the dtype in which they are stored."""
    in_features: int
    group: int
    """Inputs per scale."""
    dtype: torch.dtype
    """What dequantised numbers are rounded to: the model's dtype."""
    rows_per_scale: int = 1
    zero: int = 0
    """The code that means zero, if there are no `zeros`."""
    zeros: Tensor | None = None
    """uint8 [N, K / group]"""
    levels: Tensor | None = None
    """float32 [16 or 256]: the value of each code."""
    output_scales: Tensor | None = None
    """float32 [N]"""
    offsets: Tensor | None = None
    """[N, K / group], in the dtype in which they are stored."""
    order: Tensor | None = None
    """int64 [K]: column i of the codes belongs to input `order[i]` (act-order)."""

    @property
    def bits(self) -> int:
        return 4 if self.codes.shape[1] != self.in_features else 8

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.in_features

    @property
    def num_bytes(self) -> int:
        """Without `levels` and `order`, a few KiB."""
        parts = (self.codes, self.scales, self.zeros, self.output_scales, self.offsets)
        return sum(part.nbytes for part in parts if part is not None)

    def to(self, device: torch.device) -> GroupedWeight:
        fields = ("codes", "scales", "zeros", "levels", "output_scales", "offsets", "order")
        parts = {name: getattr(self, name) for name in fields}
        return replace(self, **{name: part.to(device) for name, part in parts.items() if part is not None})

    def dequantised(self, first: int = 0, last: int | None = None) -> Tensor:
        """float32 rows first to last, in the order of the inputs. The reference: it defines what the codes mean."""
        rows = slice(first, self.shape[0] if last is None else last)
        codes = self.codes[rows]
        if self.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), dim=2).flatten(1)
        levels = codes.float() if self.levels is None else self.levels[codes.int()]
        if self.zeros is not None:
            levels -= self._by_input(self.zeros[rows].float())
        elif self.zero:
            levels -= self.zero
        levels *= self._by_input(self.scale_rows(rows))
        if self.output_scales is not None:
            levels *= self.output_scales[rows, None]
        if self.offsets is not None:
            levels += self._by_input(self.offsets[rows].float())
        if self.order is None:
            return levels
        return torch.empty_like(levels).index_copy_(1, self.order, levels)

    def scale_rows(self, rows: slice = slice(None)) -> Tensor:
        """float32 [rows, K / group]"""
        if self.rows_per_scale == 1:
            return self.scales[rows].float()
        owners = torch.arange(self.shape[0], device=self.scales.device)[rows] // self.rows_per_scale
        return self.scales.float()[owners]

    def _by_input(self, by_group: Tensor) -> Tensor:
        return by_group.repeat_interleave(self.group, dim=1)[:, : self.in_features]


def join(weights: Sequence[GroupedWeight]) -> GroupedWeight | tuple[GroupedWeight, ...]:
    """The weights as one, its outputs after each other; as they are if they differ in more than codes and scales."""
    first = weights[0]
    if not all(_fits_after(first, weight) for weight in weights):
        return tuple(weights)
    if len(weights) == 1:
        return first

    def cat(name: str) -> Tensor | None:
        parts = [getattr(weight, name) for weight in weights]
        return None if parts[0] is None else _cat(parts)

    scales, rows_per_scale = cat("scales"), first.rows_per_scale
    if any(weight.shape[0] % rows_per_scale for weight in weights[:-1]):
        scales, rows_per_scale = _cat([weight.scale_rows() for weight in weights]), 1
    assert scales is not None
    codes = cat("codes")
    assert codes is not None
    return replace(
        first,
        codes=codes,
        scales=scales,
        zeros=cat("zeros"),
        output_scales=cat("output_scales"),
        offsets=cat("offsets"),
        rows_per_scale=rows_per_scale,
    )


def _cat(parts: Sequence[Tensor]) -> Tensor:
    """Any dtype of one byte: torch.cat lacks some of them."""
    kind = parts[0].dtype
    if kind.itemsize > 1:
        return torch.cat(list(parts))
    return torch.cat([part.view(torch.uint8) for part in parts]).view(kind)


def _fits_after(first: GroupedWeight, other: GroupedWeight) -> bool:
    scalars, optional = ("in_features", "group", "rows_per_scale", "zero"), ("zeros", "output_scales", "offsets")
    same = all(getattr(first, name) == getattr(other, name) for name in scalars)
    tensors = all(getattr(first, name).dtype == getattr(other, name).dtype for name in ("codes", "scales"))
    present = all((getattr(first, name) is None) == (getattr(other, name) is None) for name in optional)
    return same and tensors and present and first.bits == other.bits and _equal_tables(first, other)


def _equal_tables(first: GroupedWeight, other: GroupedWeight) -> bool:
    for mine, others in ((first.levels, other.levels), (first.order, other.order)):
        if (mine is None) != (others is None) or (mine is not None and others is not None and not mine.equal(others)):
            return False
    return True


class GroupedReference(Head):
    """Dequantises a slice of outputs at a time and multiplies it; on a CPU in fixed tiles of rows."""

    def __init__(self, weight: GroupedWeight, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        self.num_bytes = weight.num_bytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor, addend: Tensor | None = None) -> Tensor:
        if addend is not None:
            return self._plus(x, addend)
        outputs, inputs = self.weight.shape
        rows, step = x.shape[0], max(1, _SLICE_ITEMS // inputs)
        tiles: Sequence[Tensor] = [x]
        if not x.is_cuda:
            tiles = torch.split(F.pad(x, (0, 0, 0, -rows % TILE_ROWS)), TILE_ROWS)
        out = torch.empty((sum(len(tile) for tile in tiles), outputs), dtype=x.dtype, device=x.device)
        for first in range(0, outputs, step):
            last = min(first + step, outputs)
            weight = self.weight.dequantised(first, last).to(x.dtype)
            bias = None if self.bias is None else self.bias[first:last]
            out[:, first:last] = torch.cat([F.linear(tile, weight, bias) for tile in tiles])
        return out[:rows]

    def wide(self, x: Tensor, out: Tensor | None = None, decode: bool = False) -> Tensor:
        return self(x).float()


class GroupedTriton(Head):
    """A Triton kernel that dequantises tiles in registers. `is_fixed`: with the same tiles for any number of rows."""

    def __init__(self, weight: GroupedWeight, bias: Tensor | None = None, is_fixed: bool = False) -> None:
        from millrace.ops.triton.gemm import grouped as kernel

        device = weight.codes.device
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
            weight = without_fp8(weight)
        self.weight, self.bias, self._is_fixed = weight, bias, is_fixed
        self.num_bytes = weight.num_bytes + (0 if bias is None else bias.nbytes)
        is_exponent = weight.scales.dtype == torch.float8_e8m0fnu
        self._operand = kernel.GroupedOperand(
            codes=weight.codes,
            scales=weight.scales.view(torch.uint8) if is_exponent else weight.scales,
            zeros=weight.zeros,
            levels=weight.levels,
            output_scales=weight.output_scales,
            offsets=weight.offsets,
            outputs=weight.shape[0],
            inputs=weight.in_features,
            group=weight.group,
            rows_per_scale=weight.rows_per_scale,
            zero=weight.zero,
            is_four_bits=weight.bits == 4,
        )
        self._tile_k = kernel.tile_inputs(weight.group, weight.in_features)
        if not self._tile_k:
            raise ModelError(
                f"The checkpoint has groups of {weight.group} inputs; GPU kernels need groups of a multiple of 16."
                " Run it with --device cpu."
            )
        self._programs = 2 * _processors(weight.codes.device)
        self._product, self._choose, self._fixed = kernel.grouped_product, kernel.choose_tiles, kernel.fixed_tiles

    def __call__(self, x: Tensor, addend: Tensor | None = None) -> Tensor:
        return self._plus(x, addend) if addend is not None else self._multiplied(x, x.dtype)

    def wide(self, x: Tensor, out: Tensor | None = None, decode: bool = False) -> Tensor:
        return self._multiplied(x, torch.float32)

    def _multiplied(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        outputs, inputs = self.weight.shape
        if self._is_fixed:
            tiles = self._fixed(outputs, inputs, self._tile_k, self._programs)
        else:
            tiles = self._choose(x.shape[0], outputs, inputs, self._tile_k, self._programs)
        if self.weight.order is not None:
            x = x.index_select(1, self.weight.order)
        return self._product(x, self._operand, tiles, self.bias, dtype)


def without_fp8(weight: GroupedWeight) -> GroupedWeight:
    """The same numbers, with codes and scales that kernels read on GPUs without FP8: a table has the values of FP8
    codes, and scales fit into float16."""
    scales = weight.scales.to(torch.float16) if weight.scales.dtype == torch.float8_e4m3fn else weight.scales
    if weight.codes.dtype != torch.float8_e4m3fn:
        return replace(weight, scales=scales)
    table = torch.arange(256, dtype=torch.uint8, device=weight.codes.device).view(torch.float8_e4m3fn).float()
    # The two codes of NaN occur in no weight.
    levels = torch.nan_to_num(table)
    return replace(weight, codes=weight.codes.view(torch.uint8), levels=levels, scales=scales)


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


class JoinedLinear(Head):
    """Linears over the same input whose outputs follow each other."""

    def __init__(self, linears: Sequence[Head]) -> None:
        self.linears = linears
        self.num_bytes = sum(linear.num_bytes for linear in linears)

    def __call__(self, x: Tensor, addend: Tensor | None = None) -> Tensor:
        return self._plus(x, addend) if addend is not None else torch.cat([linear(x) for linear in self.linears], 1)

    def wide(self, x: Tensor, out: Tensor | None = None, decode: bool = False) -> Tensor:
        return torch.cat([linear.wide(x) for linear in self.linears], 1)


def _by_parts(make: Any) -> Any:
    """A maker that also takes several weights, each with its rows of the bias."""

    def made(weight: Any, bias: Tensor | None = None) -> Head:
        if isinstance(weight, GroupedWeight):
            return make(weight, bias)  # type: ignore[no-any-return]
        linears, first = [], 0
        for part in weight:
            own = None if bias is None else bias[first : first + part.shape[0]]
            first += part.shape[0]
            linears.append(TiledLinear(PlainLinear(part, own)) if isinstance(part, Tensor) else make(part, own))
        return JoinedLinear(linears)

    return made


def _triton_missing(device: torch.device) -> str:
    return triton_missing(device) or ("" if device.type == "cuda" else "needs a GPU")


make_reference = _by_parts(GroupedReference)

VERSIONS = (
    Version(
        op="grouped_linear",
        name="triton",
        make=_by_parts(GroupedTriton),
        when="Triton: dequantises tiles in registers, with tiles for few rows and for many",
        devices=("cuda",),
        dtypes=(torch.bfloat16, torch.float16),
        missing=_triton_missing,
    ),
    Version(
        op="grouped_linear",
        name="triton_fixed",
        make=_by_parts(partial(GroupedTriton, is_fixed=True)),
        when="as triton, with one tile size, so that the batch cannot change a token's result",
        devices=("cuda",),
        dtypes=(torch.bfloat16, torch.float16),
        invariant_on=("cuda",),
        missing=_triton_missing,
    ),
    Version(
        op="grouped_linear",
        name="reference",
        make=make_reference,
        when="the reference: dequantises a slice of the weight at a time, in every call",
        invariant_on=("cpu",),
    ),
)
