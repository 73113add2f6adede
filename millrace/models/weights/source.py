"""The interface of every weight format: tensors by Hugging Face name, in the Hugging Face convention."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch


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
