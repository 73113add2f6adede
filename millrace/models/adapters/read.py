"""An adapter in host memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from millrace.models.adapters.files import Limits, Packed, read_files
from millrace.models.adapters.targets import NUM_KINDS, QKV, AdapterTargets
from millrace.ops.lora.weights import MAX_PARTS, LinearLora


@dataclass(frozen=True, slots=True)
class Adapter:
    """Validated matrices in host memory, in the model's dtype, or in bfloat16, see `Limits.keeps_bfloat16`."""

    data: Tensor
    """All matrices, one after the other."""
    linears: dict[int, LinearLora]
    """Parts of `data`, by index of the linear, see `AdapterTargets`."""
    max_rank: int
    digest: str
    """Of the files: names the adapter's content."""
    base_model: str
    folder: Path

    @property
    def qkv_alone(self) -> bool:
        """It changes queries, keys and values, and no other linears."""
        return all(index % NUM_KINDS == QKV for index in self.linears)

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes

    def on(self, data: Tensor) -> Adapter:
        """The same adapter in a copy of its matrices."""
        return replace(self, data=data, linears={index: lora.within(data) for index, lora in self.linears.items()})

    def to(self, device: torch.device) -> Adapter:
        return self if self.data.device == device else self.on(self.data.to(device))


def read_adapter(
    folder: Path,
    targets: AdapterTargets,
    dtype: torch.dtype,
    *,
    max_rank: int,
    max_bytes: int,
    allows_dora: bool = False,
) -> Adapter:
    """Raises AdapterError with the file, the tensor and the remedy. Nothing of the adapter is kept then."""
    limits = Limits(max_rank, max_bytes, allows_dora=allows_dora)
    packed, numbers = read_files(folder, targets, name_of(dtype), limits)
    data = torch.from_numpy(numbers)
    return unpacked(packed, data if data.dtype == dtype else data.view(dtype), folder)


def dtype_of(packed: Packed) -> torch.dtype:
    found = getattr(torch, packed.dtype)
    assert isinstance(found, torch.dtype)
    return found


def unpacked(packed: Packed, data: Tensor, folder: Path) -> Adapter:
    """`data`: the array that `packed` describes."""
    linears = {}
    for one in packed.linears:
        missing = MAX_PARTS - len(one.ranks)
        a, b = data[one.first_a :][: one.size_a], data[one.first_b :][: one.size_b]
        linears[one.index] = LinearLora(a, b, (*one.ranks, *(0,) * missing), (*one.scales, *(0.0,) * missing))
    return Adapter(data, linears, packed.max_rank, packed.digest, packed.base_model, folder)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
