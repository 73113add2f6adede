"""A linear layer whose weight stays in a quantised format of GGUF, as in its file or rewritten from a checkpoint.

make(weight, bias) -> Linear. `weight` is a `StoredWeight` if the chosen version keeps that format (`stored_order`),
else a dequantised Tensor. A weight's value is its dequantised number rounded to the model's dtype, so results are
bit-identical to the op linear over the dequantised weight, except with `int8` in the shape: activations are then
rounded to INT8 (`round_to_int8`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millrace.ops.base.version import Choice, Shape, Version
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
    "IQ4_NL": 13,
    "IQ4_XS": 14,
    "MXFP4": 15,  # with scales rewritten as float16
    "TQ1_0": 7,  # rewritten as Q2_K
    "TQ2_0": 7,
    # Rewritten as bytes.
    **dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), 12),
}
"""GGUF formats that the C++ kernels read, and their codes; the same as in cpp/linear/linear.h."""
Order = Literal["tiles", "dot"]
"""How a stored weight's integers are packed. `tiles`: to be unpacked to the model's dtype; `dot`: to be multiplied as
integers."""
ORDERS: Final[dict[Order, int]] = {order: code for code, order in enumerate(get_args(Order))}
"""The codes of PartOrder in cpp/linear/linear.h."""
INT8_BLOCK: Final = 32
"""Consecutive inputs of a row that have one scale when activations are rounded to INT8."""
INT8_FORMAT: Final = "Q8_0"
"""In which float32 matrices are kept for products of integers: a scale for each 32 inputs of an output."""
LAYOUT_VERSION: Final = 2
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
    to. `order`: the parts' order, which decides how they are multiplied."""

    parts: tuple[StoredPart, ...]
    in_features: int
    dtype: torch.dtype
    order: Order = "tiles"

    @property
    def num_bytes(self) -> int:
        return sum(part.packed.nbytes for part in self.parts)


def packed_bytes(kind: str, rows: int, columns: int) -> int:
    """Size of what `pack_stored` returns: the bytes in the file, or of what stands for some I-quants, padded to
    whole panels."""
    return int(native().with_gil.quantised_bytes(FORMATS[kind], rows, columns))


def pack_stored(kind: str, blocks: Any, rows: int, columns: int, order: Order = "tiles") -> Tensor:
    """Pack rows of GGUF blocks, given as the contiguous bytes of the file."""
    blocks = as_kernels_read(kind, blocks)
    packed = torch.empty(packed_bytes(kind, rows, columns), dtype=torch.uint8)
    native().without_gil.quantised_pack(
        FORMATS[kind], ORDERS[order], blocks.ctypes.data, packed.data_ptr(), rows, columns
    )
    return packed


def as_kernels_read(kind: str, blocks: Any) -> Any:
    """I-quants of up to three bits as bytes, MXFP4 with other scales, ternary numbers as Q2_K, others unchanged."""
    if not kind.startswith(("IQ1", "IQ2", "IQ3", "TQ")) and kind != "MXFP4":
        return blocks
    from millrace.ops.linear.byte_blocks import byte_blocks  # imports gguf, which is slow

    return byte_blocks(kind, blocks)


def fits_int8(shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and shape[1] % INT8_BLOCK == 0


def int8_bytes(shape: tuple[int, ...]) -> int:
    """What a matrix takes in memory."""
    rows, columns = shape
    return packed_bytes(INT8_FORMAT, rows, columns)


def int8_weight(matrix: Tensor) -> StoredWeight:
    rows, columns = matrix.shape
    packed = pack_stored(INT8_FORMAT, blocks_of(matrix), rows, columns, "dot")
    return StoredWeight((StoredPart(INT8_FORMAT, rows, packed),), columns, torch.float32, "dot")


def blocks_of(matrix: Tensor) -> npt.NDArray[np.uint8]:
    """The rows of a float32 matrix as Q8_0 blocks: a float16 scale, the largest magnitude / 127, then 32 integers."""
    groups = matrix.numpy().reshape(-1, INT8_BLOCK)
    scales = (np.abs(groups).max(axis=1, keepdims=True) / 127).astype(np.float16)
    wide = scales.astype(np.float32)
    # Integers are those of the rounded scale, which can be a little too small for the largest number.
    scaled = np.divide(groups, wide, out=np.zeros_like(groups), where=wide > 0)
    integers = np.rint(scaled).clip(-127, 127).astype(np.int8)
    blocks = np.concatenate([scales.view(np.uint8), integers.view(np.uint8)], axis=1)
    return np.ascontiguousarray(blocks.reshape(matrix.shape[0], -1))


def round_to_int8(x: Tensor) -> Tensor:
    """The reference for activations [T, K]: every 32 inputs become integers from -127 to 127 times one scale, their
    largest magnitude / 127."""
    blocks = x.float().reshape(x.shape[0], -1, INT8_BLOCK)
    largest = blocks.abs().amax(dim=2, keepdim=True)
    inverse = torch.full_like(largest, 127) / largest  # one division: `127 / largest` would round twice
    integers = torch.where(largest > 0, blocks * inverse, 0.0).round()
    return (integers * (largest / 127)).reshape(x.shape)


class StoredLinear(NativeParts):
    def __init__(self, weight: StoredWeight, bias: Tensor | None = None) -> None:
        parts = [(FORMATS[part.format], part.out_features, part.packed) for part in weight.parts]
        super().__init__(parts, weight.in_features, weight.dtype, bias, ORDERS[weight.order])


def native_linear(weight: Tensor | StoredWeight, bias: Tensor | None = None) -> NativeParts:
    """A linear in C++ over a plain or a stored weight."""
    return StoredLinear(weight, bias) if isinstance(weight, StoredWeight) else NativeLinear(weight, bias)


def stored_order(choice: Choice) -> Order | None:
    """The order in which the chosen version reads the stored weight; None if it reads a dequantised one."""
    if choice.version.make is not StoredLinear:
        return None
    return "dot" if choice.version.name == "int8" else "tiles"


def _in_int8(shape: Shape) -> bool:
    return bool(shape.get("int8", False))


def make_dequantised(weight: Tensor, bias: Tensor | None = None) -> TiledLinear:
    return TiledLinear(PlainLinear(weight, bias))


VERSIONS = (
    Version(
        op="stored_linear",
        name="int8",
        make=StoredLinear,
        when="C++ over quantised weights in GGUF's formats as integers, with activations rounded to INT8 per 32 inputs"
        " (--quantization int8)",
        devices=("cpu",),
        dtypes=(torch.float32,),
        invariant_on=("cpu",),
        fits=_in_int8,
        missing=native_missing,
    ),
    Version(
        op="stored_linear",
        name="native",
        make=StoredLinear,
        when="C++ over quantised weights in GGUF's formats, unpacked on the fly: fewer bytes to read, same results;"
        " decode rows use kernels that round less, unless deterministic",
        devices=("cpu",),
        # In float32 unpacking costs more than the reads it saves: few rows were 1.1 to 1.5 times slower.
        dtypes=(torch.bfloat16,),
        invariant_on=("cpu",),
        missing=native_missing,
    ),
    Version(
        op="stored_linear",
        name="native_float32",
        make=StoredLinear,
        when="as native, in float32, for a quantised checkpoint, whose weights keep their size",
        devices=("cpu",),
        dtypes=(torch.float32,),
        invariant_on=("cpu",),
        fits=lambda shape: bool(shape.get("keeps_size", False)),
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
