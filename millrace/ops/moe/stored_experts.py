"""Experts on a GPU whose weights stay as they are stored: codes with scales, or GGUF blocks.

`ExpertWeights.pairs` has a GroupedWeight or BlockWeight for each matrix, all experts' alike (`stacked`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from millrace.errors import ModelError
from millrace.ops.base.activation_kind import ExpertActivation
from millrace.ops.base.version import Version
from millrace.ops.linear.block_weight import BlockWeight
from millrace.ops.linear.grouped import grouped_operand
from millrace.ops.linear.grouped_weight import GroupedWeight
from millrace.ops.moe.experts import Experts, ExpertWeights, MakeLinear, gate
from millrace.ops.triton import triton_missing

if TYPE_CHECKING:
    from millrace.ops.triton.blocks.product import BlockOperand
    from millrace.ops.triton.gemm.grouped import GroupedOperand
    from millrace.ops.triton.moe.experts import Groups
    from millrace.ops.triton.moe.stored_experts import ExpertTiles

Stored = GroupedWeight | BlockWeight
_BY_EXPERT = ("codes", "scales", "zeros", "output_scales", "offsets")


class Stack:
    """Weights of the same kind, stacked along the outputs while they arrive one by one."""

    def __init__(self, count: int) -> None:
        self._count, self._added = count, 0
        self._first: Stored | None = None
        self._parts: dict[str, Tensor] = {}

    def add(self, weight: Stored) -> None:
        if isinstance(weight, GroupedWeight) and weight.shape[0] % weight.rows_per_scale:
            weight = replace(weight, scales=weight.scale_rows(), rows_per_scale=1)
        own = _parts_of(weight)
        if self._first is None:
            self._first = weight
            for name, part in own.items():
                shape = (self._count * part.shape[0], *part.shape[1:])
                self._parts[name] = torch.empty(shape, dtype=part.dtype, device=part.device)
        if not _is_like(weight, self._first):
            raise ModelError("Experts of one layer are quantised differently, which the GPU kernels cannot stack.")
        for name, part in own.items():
            rows = slice(self._added * part.shape[0], (self._added + 1) * part.shape[0])
            # As bytes: PyTorch copies some dtypes of one byte not at all.
            self._parts[name][rows].view(torch.uint8).copy_(part.contiguous().view(torch.uint8))
        self._added += 1

    def stacked(self) -> Stored:
        if self._first is None or self._added != self._count:
            raise ValueError("a mixture of experts needs all of its experts")
        return replace(self._first, **self._parts)  # type: ignore[arg-type]


def _parts_of(weight: Stored) -> dict[str, Tensor]:
    names = ("blocks",) if isinstance(weight, BlockWeight) else _BY_EXPERT
    return {name: part for name in names if (part := getattr(weight, name)) is not None}


def _is_like(weight: Stored, first: Stored) -> bool:
    mine, others = _parts_of(weight), _parts_of(first)
    same = mine.keys() == others.keys()
    return same and all(mine[name].shape == others[name].shape for name in mine) and _kind(weight) == _kind(first)


def _kind(weight: Stored) -> tuple[object, ...]:
    if isinstance(weight, BlockWeight):
        return weight.kind, weight.in_features
    return weight.codes.dtype, weight.in_features, weight.group, weight.zero, weight.rows_per_scale


class _Product:
    """One of the two matrix products."""

    def __init__(self, weight: Stored, bias: Tensor | None = None) -> None:
        from millrace.ops.triton.blocks.product import operand
        from millrace.ops.triton.moe import stored_experts as kernels

        self._multiply, self._tile_k, self._bias = kernels.expert_product, 0, bias
        self._operand: BlockOperand | GroupedOperand
        if isinstance(weight, BlockWeight):
            self._operand = operand(weight.kind, weight.blocks, weight.in_features)
        else:
            if weight.order is not None:
                raise ModelError("Experts with act-order have no GPU kernel.")
            weight, self._operand, self._tile_k = grouped_operand(weight)
        self.num_bytes = weight.num_bytes

    def __call__(self, x: Tensor, groups: Groups, slots_per_row: int, tiles: ExpertTiles) -> Tensor:
        return self._multiply(x, self._operand, self._tile_k, groups, slots_per_row, tiles, self._bias)


class StoredExperts(Experts):
    """Two products that decode tiles in registers. `is_fixed`: with one tile size for any number of tokens."""

    def __init__(
        self, weights: ExpertWeights, activation: ExpertActivation, linear: MakeLinear, is_fixed: bool = False
    ) -> None:
        from millrace.ops.triton.moe import experts as moe
        from millrace.ops.triton.moe import stored_experts as kernels

        stacks = _stack(weights.pairs, weights.count)
        biases = weights.biases or (None, None)
        self._gate_up, self._down = _Product(stacks[0], biases[0]), _Product(stacks[1], biases[1])
        self.num_bytes = self._gate_up.num_bytes + self._down.num_bytes
        self.activation: ExpertActivation = activation
        self._count, self._is_fixed = weights.count, is_fixed
        self._group, self._combine = moe.group, moe.combine
        self._choose, self._fixed = kernels.choose_tiles, kernels.FIXED

    def __call__(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
        if x.shape[0] == 0:
            return torch.empty_like(x)
        tiles = self._fixed if self._is_fixed else self._choose(expert_ids.numel(), self._count)
        groups = self._group(expert_ids.contiguous(), self._count)
        hidden = gate(self._gate_up(x.contiguous(), groups, expert_ids.shape[1], tiles), self.activation)
        return self._combine(self._down(hidden.contiguous(), groups, 1, tiles), weights.contiguous())


def _stack(pairs: Iterable[tuple[Stored, Stored]], count: int) -> tuple[Stored, Stored]:
    gate_up, down = Stack(count), Stack(count)
    for first, second in pairs:
        gate_up.add(first)
        down.add(second)
    return gate_up.stacked(), down.stacked()


VERSIONS = (
    Version(
        op="experts",
        name="stored",
        make=StoredExperts,
        when="Triton: experts as they are stored, decoded in registers; tile sizes depend on the number of tokens",
        devices=("cuda",),
        dtypes=(torch.bfloat16, torch.float16),
        fits=lambda shape: bool(shape.get("stored", False)),
        missing=triton_missing,
    ),
    Version(
        op="experts",
        name="stored_fixed",
        make=partial(StoredExperts, is_fixed=True),
        when="as stored, with one tile size, so that the batch cannot change a token's result",
        devices=("cuda",),
        dtypes=(torch.bfloat16, torch.float16),
        invariant_on=("cuda",),
        fits=lambda shape: bool(shape.get("stored", False)),
        missing=triton_missing,
    ),
)
