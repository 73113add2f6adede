"""Grouped weights: the matrices that stay as a quantised checkpoint stores them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from millrace.models.formats.base import QuantisedMatrix
from millrace.models.spec.layout import ModelLayout, MoeLayout, TensorSpec, matrices_of
from millrace.models.stored import KeptMatrices
from millrace.ops.base.quantised import Quantised
from millrace.ops.cpp.native import DTYPES, native_missing
from millrace.ops.linear.block_weight import BlockWeight, join_blocks
from millrace.ops.linear.fp8 import StoredFp8, fp8_missing
from millrace.ops.linear.grouped_weight import GroupedWeight, join
from millrace.ops.linear.stored import packed_bytes
from millrace.ops.triton import triton_missing

log = logging.getLogger(__name__)


@runtime_checkable
class GroupedSource(Protocol):
    """A quantised checkpoint: a source of weights that can also return them as they are stored."""

    def matrices(self) -> Mapping[str, QuantisedMatrix]: ...

    def grouped(self, name: str, dtype: torch.dtype) -> GroupedWeight | BlockWeight: ...

    def get(self, name: str, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Tensor: ...


class GroupedMatrices:
    """Matrices that the CPU kernels do not hold (`stored`) and of which at least one part is quantised."""

    def __init__(
        self,
        source: GroupedSource,
        layout: ModelLayout,
        device: torch.device,
        dtype: torch.dtype,
        stored: KeptMatrices | None,
    ) -> None:
        self._source, self._device, self._dtype = source, device, dtype
        quantised = source.matrices()
        candidates = _linear_parts(layout)
        if device.type != "cpu":
            candidates = [(layout.embedding,), *candidates]
        found = [parts for parts in candidates if any(part.name in quantised for part in parts)]
        self._parts = {parts for parts in found if stored is None or not stored.holds(parts)}
        self._experts: set[tuple[TensorSpec, ...]] = set() if device.type == "cpu" else set(expert_parts(layout))
        self._widened = self._cannot_stack(layout) & self._parts
        self._parts -= self._widened
        self._has_kernels = device.type == "cpu" and dtype in DTYPES and not native_missing(device)
        self._has_fp8 = dtype == torch.bfloat16 and not fp8_missing(device)

    def _cannot_stack(self, layout: ModelLayout) -> set[tuple[TensorSpec, ...]]:
        """Experts on a GPU that its kernels do not read as they are stored."""
        found: set[tuple[TensorSpec, ...]] = set()
        if not self._experts:
            return found
        has_kernels = self._dtype in (torch.bfloat16, torch.float16) and not triton_missing(self._device)
        quantised = self._source.matrices()
        for layer in (layer.mlp for layer in layout.layers if isinstance(layer.mlp, MoeLayout)):
            pairs = [(gate_up.parts, down.parts) for gate_up, down in layer.experts]
            for matrices in zip(*pairs, strict=True):
                kinds = {quantised.get(part.name) for parts in matrices for part in parts}
                labels = {None if kind is None else kind.label for kind in kinds}
                alike = len(labels) == 1 and all(kind is not None and kind.can_stack for kind in kinds)
                if not (alike and has_kernels):
                    found.update(parts for pair in pairs for parts in pair)
        return found

    def warn(self) -> None:
        """Log what is wider than stored, and what is slow."""
        if self._widened:
            log.warning(
                "the experts of %d matrices are dequantised at load: the GPU's kernels read experts that are quantised"
                " alike in a layer, without act-order, in groups of a multiple of 32 inputs",
                len(self._widened),
            )
        slow = [parts for parts in self._parts if self._device.type == "cpu" and not self.has_blocks(parts)]
        matrices = self._source.matrices()
        labels = sorted({matrices[part.name].label for parts in slow for part in parts if part.name in matrices})
        if labels:
            log.warning(
                "no CPU kernel reads %s: %d matrices are dequantised in every product, which is slow;"
                " a GGUF file or a checkpoint of 4- or 8-bit integers is faster",
                "; ".join(labels),
                len(slow),
            )

    def holds(self, parts: tuple[TensorSpec, ...]) -> bool:
        return parts in self._parts

    def multiplies_fp8(self, parts: tuple[TensorSpec, ...]) -> bool:
        """True if the device multiplies the stored FP8 numbers, else they are dequantised in each product."""
        matrices = [self._source.matrices().get(part.name) for part in parts]
        return (
            self._has_fp8
            and parts not in self._experts
            and all(matrix is not None and matrix.is_fp8_by_output for matrix in matrices)
        )

    def has_blocks(self, parts: tuple[TensorSpec, ...]) -> bool:
        """True if the CPU kernels read every quantised part as GGUF blocks."""
        matrices = [self._source.matrices().get(part.name) for part in parts]
        return self._has_kernels and all(matrix is None or matrix.gguf is not None for matrix in matrices)

    def num_bytes(self, parts: tuple[TensorSpec, ...]) -> int:
        has_blocks = self.has_blocks(parts)
        return sum(self._part_bytes(part, has_blocks) for part in parts)

    def _part_bytes(self, part: TensorSpec, has_blocks: bool) -> int:
        matrix = self._source.matrices().get(part.name)
        if matrix is None:
            return part.num_items * self._dtype.itemsize
        if has_blocks and matrix.gguf is not None:
            return packed_bytes(matrix.gguf, *matrix.shape)
        return matrix.num_bytes

    def saved_bytes(self) -> int:
        """Bytes saved compared with the model's dtype."""
        plain = sum(part.num_items for parts in self._parts for part in parts) * self._dtype.itemsize
        return plain - sum(self.num_bytes(parts) for parts in self._parts)

    def weight(self, parts: tuple[TensorSpec, ...]) -> Any:
        """A weight for fp8_linear (`multiplies_fp8`) or grouped_linear."""
        read = [self._read(part) for part in parts]
        if self.has_blocks(parts):
            return tuple(read)
        joined: Any = tuple(read)
        if all(isinstance(part, GroupedWeight) for part in read):
            joined = join(read)
        elif all(isinstance(part, BlockWeight) for part in read):
            joined = join_blocks(read)
        if self.multiplies_fp8(parts):
            return StoredFp8(Quantised(joined.codes, joined.scales.view(-1)), self._dtype)
        return joined

    def _read(self, part: TensorSpec) -> Any:
        if part.name in self._source.matrices():
            return self._source.grouped(part.name, self._dtype).to(self._device)
        return self._source.get(part.name, device=self._device, dtype=self._dtype)


def _linear_parts(layout: ModelLayout) -> list[tuple[TensorSpec, ...]]:
    parts = [matrix.parts for layer in layout.layers for matrix in matrices_of(layer)]
    return parts if layout.head is None else [*parts, layout.head.parts]


def expert_parts(layout: ModelLayout) -> list[tuple[TensorSpec, ...]]:
    layers = [layer.mlp for layer in layout.layers if isinstance(layer.mlp, MoeLayout)]
    return [matrix.parts for mlp in layers for pair in mlp.experts for matrix in pair]
