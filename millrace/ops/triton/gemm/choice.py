"""Which tiles a product takes: what was measured for its size, or a rule for the sizes nobody measured."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from millrace.ops.triton import gluon_missing
from millrace.ops.triton.gemm import table as gemm_table
from millrace.ops.triton.gemm.product import Tiles, new_counters
from millrace.ops.triton.gemm.table import MEASURED_ON, Entry, Table

T = TypeVar("T")

ALIKE = 1.5
"""A size that nobody measured takes the tiles of one within this factor; the others go to the library."""
MANY_ACTIVATIONS = ("silu", "gelu_tanh")
MANY_OUTPUTS, MANY_INPUTS = 3072, 1024
"""The least sizes at which a kernel for many rows was measured."""
HEAD_INPUTS = 64
"""Inputs that `greedy_head` takes at a time."""
INVARIANT = Tiles("dot", 64, 64, 128, warps=4, stages=3)
"""Tiles of the products whose result for a row must not depend on the others: the same for any number of rows."""
INVARIANT_PROGRAMS = 256
"""How many programs a product with one tile of rows should at least have."""
INVARIANT_PARALLEL_ROWS = 128
"""Up to here the parts of a split sum are programs of their own; with more rows there are enough without."""


@dataclass(frozen=True, slots=True)
class ByRows(Generic[T]):
    """What one product takes for each number of rows; None is the library."""

    limits: tuple[int, ...] = ()
    choices: tuple[T | None, ...] = ()

    def of(self, rows: int) -> T | None:
        at = bisect_left(self.limits, rows)
        return self.choices[at] if at < len(self.choices) else None


class TilesByRows(ByRows[Tiles]):
    __slots__ = ()

    def counters(self, outputs: int, device: torch.device) -> Tensor | None:
        """Counters that suffice for all choices, or None where no sum is split."""
        needed = 0
        for limit, tiles in zip(self.limits, self.choices, strict=True):
            if tiles is not None and tiles.split > 1:
                needed = max(needed, tiles.count(limit, outputs))
        return new_counters(needed, device) if needed else None


LIBRARY = TilesByRows()


def measured(table: Table, weight: Tensor) -> TilesByRows:
    """From the table, if this is the chip it was measured on and the weight's size, or one much like it, is in it."""
    outputs, inputs = weight.shape
    entries = nearest(table, outputs, inputs)
    if not entries or torch.cuda.get_device_capability(weight.device) != MEASURED_ON:
        return LIBRARY
    limits = tuple(sorted(entries))
    return TilesByRows(limits, tuple(tiles_of(entries[limit]) for limit in limits))


def measured_many(weight: Tensor, bias: Tensor | None, activation: str) -> ByRows[tuple[int, int]]:
    """Rows and outputs of a tile of `gated_many`, for the numbers of rows at which it was measured faster, if it can
    compute this product: its rows begin at whole 16 bytes, and there is no bias."""
    outputs, inputs = weight.shape[0] // 2, weight.shape[1]
    is_plain = bias is None and weight.dtype == torch.bfloat16 and weight.is_contiguous()
    if not is_plain or outputs % 8 or inputs % 8 or activation not in MANY_ACTIVATIONS or gluon_missing(weight.device):
        return ByRows()
    entries = nearest(gemm_table.GATED_MANY, *weight.shape)
    if not entries and outputs >= MANY_OUTPUTS and inputs >= MANY_INPUTS:
        entries = gemm_table.GATED_MANY_OTHERS
    limits = tuple(sorted(entries))
    return ByRows(limits, tuple(entries[limit] for limit in limits))


def measured_head(weight: Tensor, bias: Tensor | None) -> ByRows[tuple[int, int, int]]:
    """What `greedy_head` takes, for the numbers of rows at which it was measured faster, if it can compute this
    product."""
    is_plain = bias is None and weight.dtype == torch.bfloat16 and weight.is_contiguous()
    if not is_plain or weight.shape[1] % HEAD_INPUTS or gluon_missing(weight.device):
        return ByRows()
    entries = nearest(gemm_table.GREEDY_HEAD, *weight.shape)
    limits = tuple(sorted(entries))
    return ByRows(limits, tuple(entries[limit] for limit in limits))


def tiles_of(entry: Entry) -> Tiles | None:
    if entry is None:
        return None
    fields: tuple[Any, ...] = entry
    return Tiles(*fields)


@dataclass(frozen=True, slots=True)
class Fp8Tiles:
    """What a product with a weight in eight bits takes, by what its input is."""

    rows: TilesByRows
    """In eight bits with a scale per row; None is the library."""
    wide: TilesByRows = LIBRARY
    """In the model's dtype, which only gemv takes; None: it is quantised first."""


def measured_fp8(weight: Tensor) -> Fp8Tiles:
    return Fp8Tiles(measured(gemm_table.FP8, weight), measured(gemm_table.FP8_WIDE, weight))


def nearest(table: dict[tuple[int, int], dict[int, T]], outputs: int, inputs: int) -> dict[int, T]:
    """The entries of the size that differs least; nothing where all differ by more than ALIKE in one direction."""
    if (outputs, inputs) in table:
        return table[outputs, inputs]
    if inputs % 16:
        return {}  # rows that do not start at whole vectors

    def distance(size: tuple[int, int]) -> float:
        return max(abs(math.log(size[0] / outputs)), abs(math.log(size[1] / inputs)))

    best = min(table, key=distance, default=None)
    return {} if best is None or distance(best) > math.log(ALIKE) else table[best]


def invariant(rows: int, weight: Tensor) -> Tiles:
    """Cut by the weight's size alone; the number of rows decides only what runs side by side."""
    outputs, inputs = weight.shape
    parts = max(1, min(8, INVARIANT_PROGRAMS // -(-outputs // INVARIANT.n), inputs // 512))
    return Tiles(
        INVARIANT.kind,
        INVARIANT.m,
        INVARIANT.n,
        INVARIANT.k if weight.element_size() <= 2 else INVARIANT.k // 4,
        split=parts,
        warps=INVARIANT.warps,
        stages=INVARIANT.stages,
        parallel=rows <= INVARIANT_PARALLEL_ROWS,
    )


def invariant_counters(outputs: int, device: torch.device) -> Tensor:
    return new_counters(INVARIANT.count(INVARIANT_PARALLEL_ROWS, outputs), device)
