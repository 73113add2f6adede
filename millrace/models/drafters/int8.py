"""A drafter's matrices in 8 bits, for the INT8 products that the target uses on a CPU.

Drafters are stored unquantised. Each 32 inputs of an output get one scale, as in GGUF's Q8_0, so the kernels of
`--quantization int8` multiply them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millrace.models.drafters.checkpoint import DrafterTensors
from millrace.models.spec.layout import TensorSpec
from millrace.ops.linear.stored import INT8_BLOCK, StoredPart, StoredWeight, pack_stored, packed_bytes

FORMAT = "Q8_0"


class Int8Matrices:
    """Every matrix of a drafter whose inputs fill whole groups of 32."""

    def __init__(self, tensors: DrafterTensors) -> None:
        self._tensors = tensors

    def holds(self, parts: tuple[TensorSpec, ...]) -> bool:
        return all(fits_int8(part.shape) for part in parts)

    def saved_bytes(self) -> int:
        """Progress is not reported, so nothing needs it."""
        return 0

    def weight(self, parts: tuple[TensorSpec, ...]) -> StoredWeight:
        joined = torch.cat([self._tensors.get(part.name, dtype=torch.float32) for part in parts])
        rows, columns = joined.shape
        packed = pack_stored(FORMAT, blocks_of(joined), rows, columns, "dot")
        return StoredWeight((StoredPart(FORMAT, rows, packed),), columns, torch.float32, "dot")


def fits_int8(shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and shape[1] % INT8_BLOCK == 0


def int8_bytes(shape: tuple[int, ...]) -> int:
    """What a matrix takes in memory."""
    rows, columns = shape
    return packed_bytes(FORMAT, rows, columns)


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
