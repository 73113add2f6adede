"""A linear layer over a weight of small codes with a scale per group of inputs, as quantised checkpoints store it.

make(weight, bias) -> Linear. `weight` is a `GroupedWeight`, a `BlockWeight` (the blocks of a GGUF file), or a sequence
of weights whose outputs follow each other: a fused matrix with parts that cannot be joined, some of them perhaps plain
Tensors. A weight's value is its dequantised
number rounded to the model's dtype. No version keeps a dequantised copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from millrace.errors import ModelError
from millrace.ops.base.capability import capability
from millrace.ops.base.version import Shape, Version
from millrace.ops.cpp.native import DTYPES, native_missing
from millrace.ops.linear.block_weight import BlocksTriton, BlockWeight
from millrace.ops.linear.blocks import gguf_blocks
from millrace.ops.linear.dense import TILE_ROWS, Head, PlainLinear, TiledLinear
from millrace.ops.linear.fp8 import FP8_CAPABILITY
from millrace.ops.linear.grouped_weight import GroupedWeight, without_fp8
from millrace.ops.linear.stored import Order, StoredPart, StoredWeight, native_linear, pack_stored
from millrace.ops.triton import triton_missing

if TYPE_CHECKING:
    from millrace.ops.triton.gemm.grouped import GroupedOperand

_SLICE_ITEMS = 1 << 22
"""Weights dequantised at a time by the reference."""


class GroupedReference(Head):
    """Dequantises a slice of outputs at a time and multiplies it; on a CPU in fixed tiles of rows."""

    def __init__(self, weight: GroupedWeight | BlockWeight, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        self.num_bytes = weight.num_bytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
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


def grouped_operand(weight: GroupedWeight) -> tuple[GroupedWeight, GroupedOperand, int]:
    """The weight as this GPU can read it, its tensors as the kernel reads them, and the inputs of a tile."""
    from millrace.ops.triton.gemm import grouped as kernel

    device = weight.codes.device
    if device.type == "cuda" and capability(device) < FP8_CAPABILITY:
        weight = without_fp8(weight)
    is_exponent = weight.scales.dtype == torch.float8_e8m0fnu
    operand = kernel.GroupedOperand(
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
    tile_k = kernel.tile_inputs(weight.group, weight.in_features)
    # Even and odd inputs of 4-bit codes are multiplied apart, and a matrix instruction takes 16 inputs.
    smallest = 32 if weight.bits == 4 else 16
    if tile_k < smallest:
        raise ModelError(
            f"The checkpoint has groups of {weight.group} inputs; GPU kernels for {weight.bits}-bit codes need"
            f" groups of a multiple of {smallest}. Run it with --device cpu."
        )
    return weight, operand, tile_k


class GroupedTriton(Head):
    """A Triton kernel that dequantises tiles in registers. `is_fixed`: with the same tiles for any number of rows."""

    def __init__(self, weight: GroupedWeight, bias: Tensor | None = None, is_fixed: bool = False) -> None:
        from millrace.ops.triton.gemm import grouped as kernel

        self.bias, self._is_fixed = bias, is_fixed
        self.weight, self.operand, self._tile_k = grouped_operand(weight)
        self.num_bytes = self.weight.num_bytes + (0 if bias is None else bias.nbytes)
        self._programs = 2 * _processors(weight.codes.device)
        self._product, self._choose, self._fixed = kernel.grouped_product, kernel.choose_tiles, kernel.fixed_tiles

    def __call__(self, x: Tensor) -> Tensor:
        return self._multiplied(x, x.dtype)

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
        return self._product(x, self.operand, tiles, self.bias, dtype)


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


class OrderedLinear(Head):
    """A linear over inputs in another order (act-order)."""

    def __init__(self, inner: Head, order: Tensor) -> None:
        self.inner, self.order = inner, order
        self.num_bytes = inner.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        return self.inner(x.index_select(1, self.order))

    def wide(self, x: Tensor, out: Tensor | None = None, decode: bool = False) -> Tensor:
        return self.inner.wide(x.index_select(1, self.order))


def make_blocks(weight: GroupedWeight, bias: Tensor | None = None, order: Order = "tiles") -> Head:
    """The CPU kernels over the weight as GGUF blocks."""
    assert weight.gguf is not None
    rows, columns = weight.shape
    packed = pack_stored(weight.gguf, gguf_blocks(weight, weight.gguf), rows, columns, order)
    part = StoredPart(weight.gguf, rows, packed)
    linear = native_linear(StoredWeight((part,), columns, weight.dtype, order), bias)
    return linear if weight.order is None else OrderedLinear(linear, weight.order)


class JoinedLinear(Head):
    """Linears over the same input whose outputs follow each other."""

    def __init__(self, linears: Sequence[Head]) -> None:
        self.linears = linears
        self.num_bytes = sum(linear.num_bytes for linear in linears)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([linear(x) for linear in self.linears], 1)

    def wide(self, x: Tensor, out: Tensor | None = None, decode: bool = False) -> Tensor:
        return torch.cat([linear.wide(x) for linear in self.linears], 1)


def _tiled(weight: Tensor, bias: Tensor | None) -> Head:
    return TiledLinear(PlainLinear(weight, bias))


def by_parts(make: Any, plain: Callable[[Tensor, Tensor | None], Head] = _tiled) -> Any:
    """A maker that also takes several weights, each with its rows of the bias; `plain` makes those of Tensors."""

    def made(weight: Any, bias: Tensor | None = None) -> Head:
        if isinstance(weight, (GroupedWeight, BlockWeight)):
            return make(weight, bias)  # type: ignore[no-any-return]
        linears, first = [], 0
        for part in weight:
            own = None if bias is None else bias[first : first + part.shape[0]]
            first += part.shape[0]
            linears.append(plain(part, own) if isinstance(part, Tensor) else make(part, own))
        return JoinedLinear(linears)

    return made


def make_triton(weight: GroupedWeight | BlockWeight, bias: Tensor | None = None, is_fixed: bool = False) -> Head:
    if isinstance(weight, BlockWeight):
        return BlocksTriton(weight, bias, is_fixed)
    return GroupedTriton(weight, bias, is_fixed)


def _triton_missing(device: torch.device) -> str:
    return triton_missing(device) or ("" if device.type == "cuda" else "needs a GPU")


make_reference = by_parts(GroupedReference)


def has_blocks(weight: Any) -> bool:
    """True for parts that the versions for `has_blocks` in the shape multiply."""
    return isinstance(weight, tuple) and all(isinstance(part, Tensor) or part.gguf is not None for part in weight)


def _has_blocks(shape: Shape) -> bool:
    return bool(shape.get("has_blocks", False))


VERSIONS = (
    Version(
        op="grouped_linear",
        name="blocks_int8",
        make=by_parts(partial(make_blocks, order="dot"), native_linear),
        when="C++ over the parts of a matrix as GGUF blocks, with activations rounded to INT8: for inputs in another"
        " order (act-order), or parts of which some are plain",
        devices=("cpu",),
        dtypes=(torch.float32,),
        invariant_on=("cpu",),
        fits=lambda shape: _has_blocks(shape) and bool(shape.get("int8", False)),
        missing=native_missing,
    ),
    Version(
        op="grouped_linear",
        name="blocks",
        make=by_parts(make_blocks, native_linear),
        when="as blocks_int8, unpacked on the fly, without rounding activations",
        devices=("cpu",),
        dtypes=tuple(DTYPES),
        invariant_on=("cpu",),
        fits=_has_blocks,
        missing=native_missing,
    ),
    Version(
        op="grouped_linear",
        name="triton",
        make=by_parts(make_triton),
        when="Triton: dequantises tiles in registers, with tiles for few rows and for many",
        devices=("cuda",),
        dtypes=(torch.bfloat16, torch.float16),
        missing=_triton_missing,
    ),
    Version(
        op="grouped_linear",
        name="triton_fixed",
        make=by_parts(partial(make_triton, is_fixed=True)),
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
