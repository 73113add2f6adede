"""Weights from GGUF files, dequantised and converted to the Hugging Face convention."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from millrace.errors import ModelError
from millrace.models.weights.dequantise import PLAIN, Bytes, check_supported, dequantise, stored_dtype
from millrace.models.weights.gguf_names import Part, parts_by_name
from millrace.sources.gguf.model import GgufModel


class GgufWeights:
    """Reads tensors from the memory map on demand. Thread-safe."""

    def __init__(self, model: GgufModel, config: dict[str, Any]) -> None:
        self._model = model
        self._parts = parts_by_name(model, config)
        for part in self._parts.values():
            check_supported(model.tensor(part.tensor).type, f"{self._where(part)} tensor '{part.tensor}'")
            self._check_heads(part)

    def names(self) -> Iterable[str]:
        return self._parts.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._part(name).shape

    def file_of(self, name: str) -> Path:
        return self._model.file_of(self._part(name).tensor).path

    def get(self, name: str, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        part = self._part(name)
        kind = self._model.tensor(part.tensor).type
        scale = self._scale(part)
        # Corrections are computed in float32; rounding to the requested dtype comes last.
        computed = part.minus_one or scale is not None
        out = torch.empty(part.shape, dtype=torch.float32 if computed else dtype or stored_dtype(kind))
        dequantise(self._rows(part), kind, out)
        if part.minus_one:
            out -= 1.0
        if scale is not None:
            out *= scale
        return out.to(device=device, dtype=dtype if dtype is not None else stored_dtype(kind))

    def stored_format(self, name: str) -> str | None:
        """The format of a quantised matrix whose blocks can be used unchanged; else None."""
        part = self._part(name)
        tensor = self._model.tensor(part.tensor)
        plain = tensor.type in PLAIN or len(part.shape) != 2
        return None if plain or part.minus_one or self._scale(part) is not None else tensor.type.name

    def stored_rows(self, name: str) -> Bytes:
        """The matrix's stored blocks [rows, bytes], contiguous, in the Hugging Face order of rows."""
        return np.ascontiguousarray(self._rows(self._part(name)))

    def _part(self, name: str) -> Part:
        part = self._parts.get(name)
        if part is None:
            raise ModelError(f"{self._model.path} has no tensor for {name}; the file is incomplete.")
        return part

    def _where(self, part: Part) -> str:
        return f"{self._model.file_of(part.tensor).path}:"

    def _rows(self, part: Part) -> Bytes:
        """The part's raw bytes. Blocks never span rows, so rows can be reordered before decoding."""
        raw = self._model.data(part.tensor)
        total_rows = self._total_rows(part)
        rows = raw.reshape(total_rows, -1)[part.first_row : part.first_row + part.num_rows]
        if not part.permuted_heads:
            return rows
        pairs = rows.reshape(part.permuted_heads, -1, 2, rows.shape[-1])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)

    def _total_rows(self, part: Part) -> int:
        shape = self._model.tensor(part.tensor).shape
        return shape[0] if len(shape) == 1 else int(np.prod(shape[:-1], dtype=np.int64))

    def _check_heads(self, part: Part) -> None:
        """Check that rows divide into heads of even size, and that vectors are not quantised."""
        tensor = self._model.tensor(part.tensor)
        if part.permuted_heads and part.num_rows % (2 * part.permuted_heads):
            raise ModelError(
                f"{self._where(part)} tensor '{part.tensor}' has {part.num_rows} rows, which are not"
                f" {part.permuted_heads} heads of an even size. Convert the model again."
            )
        if len(tensor.shape) == 1 and tensor.num_bytes % tensor.shape[0]:
            raise ModelError(
                f"{self._where(part)} tensor '{part.tensor}' is a vector of type {tensor.type.name};"
                " vectors must not be quantised. Convert the model again."
            )

    def _scale(self, part: Part) -> float | None:
        """Some 4-bit files store a further factor per tensor, or per expert, in a separate tensor."""
        name = part.tensor.removesuffix(".weight") + ".scale"
        if name not in self._model:
            return None
        values = self._model.data(name).view("<f4")
        return float(values[part.expert if part.expert is not None and len(values) > 1 else 0])
