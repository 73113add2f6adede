"""The interface of every weight format: tensors by Hugging Face name, in the Hugging Face convention."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from millrace.models.spec.shard import Cut


class WeightSource(Protocol):
    def names(self) -> Iterable[str]:
        """All available names, without a tied LM head."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape, without reading the tensor."""
        ...

    def get(self, name: str, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A new tensor, by default on the CPU; without `dtype`, float32 if quantised, else the stored dtype."""
        ...

    def file_of(self, name: str) -> Path:
        """The file that holds the tensor, for error messages."""
        ...


@runtime_checkable
class PartSource(Protocol):
    """A source that can read a part of a tensor without the rest of it."""

    def part(
        self, name: str, cut: Cut, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor: ...


def cut_of(tensor: torch.Tensor, cut: Cut) -> torch.Tensor:
    return tensor[cut.slices(tensor.dim())].contiguous()
