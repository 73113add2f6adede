"""What every weight format offers: tensors by their Hugging Face name, in the Hugging Face convention."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch


class WeightSource(Protocol):
    def names(self) -> Iterable[str]:
        """The names that can be asked for. A tied output head is not among them."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Known without reading the tensor."""
        ...

    def get(self, name: str, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A fresh tensor, on the CPU unless told otherwise; without `dtype`, float32 if quantised, else as stored."""
        ...

    def file_of(self, name: str) -> Path:
        """The file that holds it, for error messages."""
        ...
