"""The low-rank matrices of one linear: of one adapter, and of the adapters in all slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_PARTS = 3
"""Parts of a linear's outputs: queries, keys and values."""
ALIGN = 16
"""Matrices that are joined begin at multiples of so many numbers."""


@dataclass(frozen=True, slots=True)
class LoraPart:
    """Of one part of a linear's outputs: y += scale · (x Aᵀ) B."""

    a: Tensor
    """[rank, in_features]"""
    b: Tensor
    """[rank, outputs]: transposed, so that outputs are contiguous."""
    scale: float


@dataclass(frozen=True, slots=True)
class LinearLora:
    """Of all parts of a linear, packed as the kernels read them."""

    a: Tensor
    """Flat: the A of each part that the adapter changes, one after the other."""
    b: Tensor
    ranks: tuple[int, ...]
    """By part, MAX_PARTS of them; 0 for a part that the adapter leaves as it is."""
    scales: tuple[float, ...]

    def parts(self, in_features: int, out_sizes: Sequence[int]) -> list[tuple[int, int, Tensor, Tensor, float]]:
        """(first output, end, A, B, scale) of each part that the adapter changes."""
        found, first, at_a, at_b = [], 0, 0, 0
        for size, rank, scale in zip(out_sizes, self.ranks, self.scales, strict=False):
            if rank:
                a = self.a[at_a : at_a + rank * in_features].view(rank, in_features)
                b = self.b[at_b : at_b + rank * size].view(rank, size)
                found.append((first, first + size, a, b, scale))
                at_a, at_b = at_a + a.numel(), at_b + b.numel()
            first += size
        return found

    def to(self, device: torch.device) -> LinearLora:
        return LinearLora(self.a.to(device), self.b.to(device), self.ranks, self.scales)

    def within(self, data: Tensor) -> LinearLora:
        """The same linear in a copy of the tensor that it is a part of."""
        a, b = (data[own.storage_offset() :][: own.numel()] for own in (self.a, self.b))
        return LinearLora(a, b, self.ranks, self.scales)


def pack(parts: Sequence[LoraPart | None]) -> LinearLora:
    own = [part for part in parts if part is not None]
    missing = [None] * (MAX_PARTS - len(parts))
    return LinearLora(
        torch.cat([part.a.flatten() for part in own]),
        torch.cat([part.b.flatten() for part in own]),
        tuple(0 if part is None else part.a.shape[0] for part in (*parts, *missing)),
        tuple(0.0 if part is None else part.scale for part in (*parts, *missing)),
    )


def join(linears: Mapping[int, LinearLora], *, is_pinned: bool = False) -> tuple[Tensor, dict[int, LinearLora]]:
    """All matrices in one tensor, which one copy moves, and the linears as parts of it."""
    matrices = [own for lora in linears.values() for own in (lora.a, lora.b)]
    sizes = [-(-own.numel() // ALIGN) * ALIGN for own in matrices]
    data = torch.zeros(sum(sizes), dtype=matrices[0].dtype, pin_memory=is_pinned)
    parts = torch.split(data, sizes)
    places = [part[: own.numel()].copy_(own) for part, own in zip(parts, matrices, strict=True)]
    pairs = zip(linears.items(), places[::2], places[1::2], strict=True)
    return data, {index: LinearLora(a, b, lora.ranks, lora.scales) for (index, lora), a, b in pairs}


class LoraColumns:
    """What kernels read of all linears' matrices, by linear and slot. Slot 0 is the base model and has none. The memory
    never moves; whoever changes it orders that with the steps."""

    def __init__(self, num_linears: int, num_slots: int, device: torch.device) -> None:
        shape = (num_linears, num_slots)
        self.a = torch.zeros(shape, dtype=torch.int64, device=device)
        """Address of `LinearLora.a`. On a CPU the lowest bit is set if it is bfloat16; else it is float32 there."""
        self.b = torch.zeros(shape, dtype=torch.int64, device=device)
        self.ranks = torch.zeros((*shape, MAX_PARTS), dtype=torch.int32, device=device)
        self.scales = torch.zeros((*shape, MAX_PARTS), dtype=torch.float32, device=device)
        self.held: list[dict[int, LinearLora]] = [{} for _ in range(num_slots)]
        """By slot and linear: what the addresses point to."""

    def put(self, slot: int, linears: dict[int, LinearLora]) -> None:
        """Replace what the slot holds; the matrices are on the device."""
        count, device = len(self.a), self.a.device
        none = (0,) * MAX_PARTS
        found = [linears.get(index) for index in range(count)]
        ranks = [none if one is None else one.ranks for one in found]
        scales = [none if one is None else one.scales for one in found]
        addresses = [(0, 0) if one is None else (_address(one.a), _address(one.b)) for one in found]
        columns = _sent(torch.tensor(addresses, dtype=torch.int64), device)
        self.a[:, slot], self.b[:, slot] = columns[:, 0], columns[:, 1]
        self.ranks[:, slot] = _sent(torch.tensor(ranks, dtype=torch.int32), device)
        self.scales[:, slot] = _sent(torch.tensor(scales, dtype=torch.float32), device)
        self.held[slot] = linears


class LoraTable:
    """One linear's matrices by slot."""

    def __init__(self, columns: LoraColumns, index: int, out_sizes: tuple[int, ...], in_features: int) -> None:
        self.in_features = in_features
        self.out_sizes = (*out_sizes, *(0,) * (MAX_PARTS - len(out_sizes)))
        self.a, self.b = columns.a[index], columns.b[index]
        self.ranks, self.scales = columns.ranks[index], columns.scales[index]
        self.sizes = torch.tensor(self.out_sizes, dtype=torch.int64)
        """`out_sizes`, on the host."""
        self._columns, self._index = columns, index

    def parts(self, slot: int) -> list[tuple[int, int, Tensor, Tensor, float]]:
        """(first output, end, A, B, scale) of each part that the slot's adapter changes."""
        lora = self._columns.held[slot].get(self._index)
        return [] if lora is None else lora.parts(self.in_features, self.out_sizes)


def _address(matrix: Tensor) -> int:
    """As tables have it."""
    return matrix.data_ptr() | (matrix.device.type == "cpu" and matrix.dtype == torch.bfloat16)


def _sent(values: Tensor, device: torch.device) -> Tensor:
    """On the device, without waiting for the steps queued there."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values
