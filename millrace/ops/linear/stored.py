"""A linear layer whose weight stays in the quantised format of its GGUF file.

make(weight, bias) -> Linear. `weight` is a `StoredWeight` if the chosen version keeps that format (`keeps_stored`),
else a dequantised Tensor. A weight's value is its dequantised number rounded to the model's dtype, so results are
bit-identical to the op linear over the dequantised weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from millrace.ops.base.version import Choice, Version
from millrace.ops.cpp.native import native, native_missing
from millrace.ops.linear.dense import NativeLinear, NativeParts, PlainLinear, TiledLinear

FORMATS: Final = {
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 4,
    "Q5_1": 5,
    "Q8_0": 6,
    "Q2_K": 7,
    "Q3_K": 8,
    "Q4_K": 9,
    "Q5_K": 10,
    "Q6_K": 11,
}
"""GGUF formats that the C++ kernels read, and their codes; the same as in cpp/linear/linear.h."""
LAYOUT_VERSION: Final = 1
"""Increase when the packed bytes change, so that packed weights cached on disk are rebuilt."""


@dataclass(frozen=True, slots=True)
class StoredPart:
    """Consecutive outputs of a weight in one format, packed by `pack_stored`."""

    format: str
    out_features: int
    packed: Tensor


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight [outputs, inputs] as consecutive parts along the outputs. `dtype`: what dequantised numbers are rounded
    to."""

    parts: tuple[StoredPart, ...]
    in_features: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return sum(part.packed.nbytes for part in self.parts)


def packed_bytes(kind: str, rows: int, columns: int) -> int:
    """Size of what `pack_stored` returns: the bytes in the file, padded to whole panels."""
    return int(native().with_gil.quantised_bytes(FORMATS[kind], rows, columns))


def pack_stored(kind: str, blocks: Any, rows: int, columns: int) -> Tensor:
    """Pack rows of GGUF blocks, given as the contiguous bytes of the file."""
    packed = torch.empty(packed_bytes(kind, rows, columns), dtype=torch.uint8)
    native().without_gil.quantised_pack(FORMATS[kind], blocks.ctypes.data, packed.data_ptr(), rows, columns)
    return packed


class StoredLinear(NativeParts):
    def __init__(self, weight: StoredWeight, bias: Tensor | None = None) -> None:
        parts = [(FORMATS[part.format], part.out_features, part.packed) for part in weight.parts]
        super().__init__(parts, weight.in_features, weight.dtype, bias)


def native_linear(weight: Tensor | StoredWeight, bias: Tensor | None = None) -> NativeParts:
    """A linear in C++ over a plain or a stored weight."""
    return StoredLinear(weight, bias) if isinstance(weight, StoredWeight) else NativeLinear(weight, bias)


def keeps_stored(choice: Choice) -> bool:
    return choice.version.make is StoredLinear


def make_dequantised(weight: Tensor, bias: Tensor | None = None) -> TiledLinear:
    return TiledLinear(PlainLinear(weight, bias))


VERSIONS = (
    Version(
        op="stored_linear",
        name="native",
        make=StoredLinear,
        when="C++ over the quantised weights of a GGUF file, unpacked on the fly: fewer bytes to read, same results;"
        " decode rows use kernels that round less, unless deterministic",
        devices=("cpu",),
        # In float32 unpacking costs more than the reads it saves: few rows were 1.1 to 1.5 times slower.
        dtypes=(torch.bfloat16,),
        invariant_on=("cpu",),
        missing=native_missing,
    ),
    Version(
        op="stored_linear",
        name="dequantised",
        make=make_dequantised,
        when="the reference: weights are dequantised at load, then used by the op linear",
        invariant_on=("cpu",),
    ),
)
