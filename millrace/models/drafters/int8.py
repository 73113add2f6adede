"""A drafter's matrices in 8 bits, for the INT8 products that the target uses on a CPU.

Drafters are stored unquantised.
"""

from __future__ import annotations

import torch

from millrace.models.drafters.checkpoint import DrafterTensors
from millrace.models.spec.layout import TensorSpec
from millrace.ops.linear.stored import StoredWeight, fits_int8, int8_weight


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
        return int8_weight(torch.cat([self._tensors.get(part.name, dtype=torch.float32) for part in parts]))
