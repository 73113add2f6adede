"""A source of the tensors of one rank: the cuts of another source's."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, runtime_checkable

import gguf
import numpy as np
import numpy.typing as npt
import torch

from millrace.models.spec.shard import Cut, Shard
from millrace.models.weights.source import PartSource, WeightSource, cut_of


@runtime_checkable
class _StoredSource(Protocol):
    """As `models/stored.py` has it."""

    def stored_format(self, name: str) -> str | None: ...

    def stored_rows(self, name: str) -> npt.NDArray[np.uint8]: ...


@runtime_checkable
class _StoredPartSource(Protocol):
    def stored_part(self, name: str, cut: Cut) -> npt.NDArray[np.uint8]: ...


class ShardWeights:
    """Also a QuantisedSource: a matrix keeps its format if the rank has whole blocks of it."""

    def __init__(self, source: WeightSource, shard: Shard) -> None:
        self._source, self._cuts = source, shard.cuts()

    def names(self) -> Iterable[str]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._cut(name).shape(self._source.shape(name))

    def file_of(self, name: str) -> Path:
        return self._source.file_of(name)

    def get(self, name: str, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        cut, source = self._cut(name), self._source
        if cut.is_zero:
            return torch.zeros(self.shape(name), device=device, dtype=dtype)
        if not isinstance(source, PartSource):
            whole = source.get(name, device=device, dtype=dtype)
            return _joined([cut_of(whole, own) for own in cut.ranges()])
        return _joined([source.part(name, own, device=device, dtype=dtype) for own in cut.ranges()])

    def stored_format(self, name: str) -> str | None:
        kind = self._source.stored_format(name) if isinstance(self._source, _StoredSource) else None
        columns = self._cut(name).columns
        if kind is None or columns is None:
            return kind
        items, _ = _block_of(kind)
        return kind if columns.start % items == columns.stop % items == 0 else None

    def stored_rows(self, name: str) -> npt.NDArray[np.uint8]:
        cut, source = self._cut(name), self._source
        if isinstance(source, _StoredPartSource):
            return np.concatenate([source.stored_part(name, own) for own in cut.ranges()])
        assert isinstance(source, _StoredSource)
        kind = source.stored_format(name)
        assert kind is not None
        stored = source.stored_rows(name)
        rows = np.concatenate([stored[own.slices(1)] for own in cut.ranges()])
        if cut.columns is None:
            return np.ascontiguousarray(rows)
        items, size = _block_of(kind)
        return np.ascontiguousarray(rows[:, cut.columns.start // items * size : cut.columns.stop // items * size])

    def _cut(self, name: str) -> Cut:
        return self._cuts.get(name, Cut())


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _block_of(kind: str) -> tuple[int, int]:
    """Inputs and bytes of a block."""
    items, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return items, size
