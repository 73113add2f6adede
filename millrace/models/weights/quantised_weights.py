"""Weights of a quantised checkpoint: plain tensors as they are, quantised matrices under the names of plain ones."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millrace.errors import ModelError
from millrace.models.formats.base import CheckpointFormat, QuantisedMatrix, StoredTensors
from millrace.models.spec.layout import ModelLayout, TensorSpec, all_tensors
from millrace.ops.linear.blocks import gguf_blocks
from millrace.ops.linear.grouped_weight import GroupedWeight

_CACHE_SCALE = re.compile(
    r".*\.self_attn\.(k_scale|v_scale|q_scale|kv_cache\..*|(attn|kv)\..*scale|[kv]_proj\.([kv]|output)_scale)"
)
"""Scales of keys and values for another engine's FP8 cache, which has none here."""


class CheckpointTensors(StoredTensors, Protocol):
    """Stored tensors, of which those that are not quantised can be read as weights."""

    def get(self, name: str, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Tensor: ...

    def stored_label(self, name: str) -> str: ...

    def stored_bytes(self, name: str) -> int: ...


class QuantisedWeights:
    """A WeightSource, a QuantisedSource and a GroupedSource. `get` dequantises."""

    def __init__(self, stored: CheckpointTensors, layout: ModelLayout, kind: CheckpointFormat) -> None:
        self._stored = stored
        self._matrices: dict[str, QuantisedMatrix] = {}
        needed = {part.name: part for part in all_tensors(layout)}
        for part in needed.values():
            matrix = _matrix_of(part, kind)
            if matrix is not None:
                self._matrices[part.name] = matrix
        parts = {name for matrix in self._matrices.values() for name in matrix.tensors}
        own = {name for name in stored.names() if name not in parts and not _CACHE_SCALE.fullmatch(name)}
        # Some tools write a bias of zeros for every module.
        extra = {name for name in own - needed.keys() if name.endswith(".bias") and not stored.raw(name).any()}
        self._names = (own - extra) | self._matrices.keys()

    def names(self) -> Iterable[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        matrix = self._matrices.get(name)
        return self._stored.shape(name) if matrix is None else matrix.shape

    def file_of(self, name: str) -> Path:
        matrix = self._matrices.get(name)
        return self._stored.file_of(name if matrix is None else matrix.tensors[0])

    def get(self, name: str, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Tensor:
        if name not in self._matrices:
            return self._stored.get(name, device=device, dtype=dtype)
        weight = self.grouped(name, dtype or torch.float32)
        return (weight if device is None else weight.to(device)).dequantised().to(dtype or torch.float32)

    def stored_label(self, name: str) -> str:
        matrix = self._matrices.get(name)
        return self._stored.stored_label(name) if matrix is None else matrix.label

    def stored_bytes(self, name: str) -> int:
        matrix = self._matrices.get(name)
        return sum(self._stored.stored_bytes(part) for part in ((name,) if matrix is None else matrix.tensors))

    def matrices(self) -> Mapping[str, QuantisedMatrix]:
        """The quantised matrices by name."""
        return self._matrices

    def grouped(self, name: str, dtype: torch.dtype) -> GroupedWeight:
        matrix = self._matrices[name]
        weight: GroupedWeight = matrix.read(dtype)
        return replace(weight, gguf=matrix.gguf)

    def stored_format(self, name: str) -> str | None:
        matrix = self._matrices.get(name)
        return None if matrix is None or matrix.has_order else matrix.gguf

    def stored_rows(self, name: str) -> npt.NDArray[np.uint8]:
        matrix = self._matrices[name]
        if matrix.gguf is None:
            raise ModelError(f"{self.file_of(name)}: {name} has no GGUF form.")
        return gguf_blocks(matrix.read(torch.float32), matrix.gguf)


def _matrix_of(part: TensorSpec, kind: CheckpointFormat) -> QuantisedMatrix | None:
    if len(part.shape) != 2:
        return None
    return kind.matrix(part.name.removesuffix(".weight"), (part.shape[0], part.shape[1]))
