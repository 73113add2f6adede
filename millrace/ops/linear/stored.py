"""A linear layer whose weight stays in the small integers and scales of the GGUF file it came from.

make(weight, bias) -> Linear, where `weight` is a `StoredWeight` if the chosen version keeps it so (`keeps_stored`), and
else a plain Tensor. What a number means is what dequantising gives, rounded to the model's dtype: results are those of
the op linear over the dequantised weight, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from millrace.ops.linear.dense import NativeLinear, NativeParts, PlainLinear, TiledLinear
from millrace.ops.native import native, native_missing
from millrace.ops.version import Choice, Version

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
"""GGUF formats that the kernels read, and their numbers there; the same as in cpp/linear/linear.h."""
LAYOUT: Final = 1
"""Changes whenever packing gives other bytes, so that packed weights kept on disk are made anew."""


@dataclass(frozen=True, slots=True)
class StoredPart:
    """Consecutive outputs of a weight, all in one format, packed by `pack_stored`."""

    format: str
    out_features: int
    packed: Tensor


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight [outputs, inputs] made of parts, one below the other. `dtype` is what its numbers are rounded to."""

    parts: tuple[StoredPart, ...]
    in_features: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return sum(part.packed.nbytes for part in self.parts)


def packed_bytes(kind: str, rows: int, columns: int) -> int:
    """What `pack_stored` needs for a weight of these sizes: the file's bytes but for padding to whole panels."""
    return int(native().quick.quantised_bytes(FORMATS[kind], rows, columns))


def pack_stored(kind: str, blocks: Any, rows: int, columns: int) -> Tensor:
    """Pack rows of blocks, a contiguous array of bytes as the file has them."""
    packed = torch.empty(packed_bytes(kind, rows, columns), dtype=torch.uint8)
    native().slow.quantised_pack(FORMATS[kind], blocks.ctypes.data, packed.data_ptr(), rows, columns)
    return packed


class StoredLinear(NativeParts):
    def __init__(self, weight: StoredWeight, bias: Tensor | None = None) -> None:
        parts = [(FORMATS[part.format], part.out_features, part.packed) for part in weight.parts]
        super().__init__(parts, weight.in_features, weight.dtype, bias)


def native_linear(weight: Tensor | StoredWeight, bias: Tensor | None = None) -> NativeParts:
    """The C++ kernels over a weight of either kind."""
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
        when="C++ over a GGUF file's own quantised numbers, unpacked on the way: fewer bytes to read, the same results;"
        " tokens after a prompt are rounded less, unless deterministic",
        devices=("cpu",),
        # In float32 unpacking costs more than reading: few rows were 1.1 to 1.5 times as slow.
        dtypes=(torch.bfloat16,),
        invariant_on=("cpu",),
        missing=native_missing,
    ),
    Version(
        op="stored_linear",
        name="dequantised",
        make=make_dequantised,
        when="defines the meaning: weights are dequantised when a model is loaded, which then takes the op linear",
        invariant_on=("cpu",),
    ),
)
