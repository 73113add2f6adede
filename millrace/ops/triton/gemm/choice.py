"""Looks up the tiles of a matrix product: those measured for its size or a similar one, or none.

The tables are `ops/tuning/<device>/gemm.json`. A product without tiles is computed by cuBLASLt.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from millrace.ops.triton import gluon_missing
from millrace.ops.triton.gemm.product import Tiles, new_counters
from millrace.ops.tuning.load import (
    EntriesByRows,
    Entry,
    entries_by_rows,
    measured_on,
    product_table,
    rule_table,
)

T = TypeVar("T")

MAX_SIZE_RATIO = 1.5
"""A size that was not measured takes the tiles of the nearest one if outputs and inputs differ by at most this
factor."""
MANY_ACTIVATIONS = ("silu", "gelu_tanh")
"""Activations that `gated_many` computes."""
HEAD_INPUTS = 64
"""Inputs in one tile of `greedy_head`."""
INVARIANT = Tiles("dot", 64, 64, 128, warps=4, stages=3)
"""Tiles of batch-invariant products: the same for any number of rows, on any device."""
INVARIANT_PROGRAMS = 256
"""Target number of programs for a product with one tile of rows."""
INVARIANT_PARALLEL_ROWS = 128
"""Up to this many rows each part of a split sum has its own program; more rows fill the GPU without that."""


@dataclass(frozen=True, slots=True)
class ByRows(Generic[T]):
    """Configuration of one product by number of rows. None: no kernel was measured faster than cuBLASLt."""

    limits: tuple[int, ...] = ()
    choices: tuple[T | None, ...] = ()

    def of(self, rows: int) -> T | None:
        at = bisect_left(self.limits, rows)
        return self.choices[at] if at < len(self.choices) else None


class TilesByRows(ByRows[Tiles]):
    __slots__ = ()

    def counters(self, outputs: int, device: torch.device) -> Tensor | None:
        """Enough counters for every choice, or None if no sum is split."""
        needed = 0
        for limit, tiles in zip(self.limits, self.choices, strict=True):
            if tiles is not None and tiles.split > 1:
                needed = max(needed, tiles.count(limit, outputs))
        return new_counters(needed, device) if needed else None


NO_TILES = TilesByRows()


def measured(section: str, weight: Tensor) -> TilesByRows:
    """Tiles from one section of the tables, for the weight's size or one close to it, or for any size."""
    entries = nearest(product_table(weight.device, "gemm", section), *weight.shape)
    if not entries and weight.shape[1] % 16 == 0 and measured_on(weight.device) is not None:
        entries = entries_by_rows(rule_table(weight.device, "gemm")["unmeasured"].get(section, {}))
    limits = tuple(sorted(entries))
    return TilesByRows(limits, tuple(tiles_of(entries[limit]) for limit in limits)) if limits else NO_TILES


def measured_many(weight: Tensor, bias: Tensor | None, activation: str) -> ByRows[tuple[int, int]]:
    """(rows, outputs) of a tile of `gated_many` for the numbers of rows at which it was measured faster. Nothing if it
    cannot compute this product: it takes no bias, and rows must start at multiples of 16 bytes."""
    outputs, inputs = weight.shape[0] // 2, weight.shape[1]
    is_plain = bias is None and weight.dtype == torch.bfloat16 and weight.is_contiguous()
    if not is_plain or outputs % 8 or inputs % 8 or activation not in MANY_ACTIVATIONS or gluon_missing(weight.device):
        return ByRows()
    entries = nearest(product_table(weight.device, "gemm", "gated_many"), *weight.shape)
    unmeasured = rule_table(weight.device, "gemm")["gated_many_unmeasured"]
    if not entries and outputs >= unmeasured["min_outputs"] and inputs >= unmeasured["min_inputs"]:
        entries = entries_by_rows(unmeasured["tiles"])
    return _by_rows(entries)


def measured_head(weight: Tensor, bias: Tensor | None) -> ByRows[tuple[int, int, int]]:
    """The tile of `greedy_head` for the numbers of rows at which it was measured faster. Nothing if it cannot compute
    this product."""
    is_plain = bias is None and weight.dtype == torch.bfloat16 and weight.is_contiguous()
    if not is_plain or weight.shape[1] % HEAD_INPUTS or gluon_missing(weight.device):
        return ByRows()
    return _by_rows(nearest(product_table(weight.device, "gemm", "greedy_head"), *weight.shape))


def _by_rows(entries: EntriesByRows) -> ByRows[Any]:
    limits = tuple(sorted(entries))
    return ByRows(limits, tuple(entries[limit] for limit in limits))


def tiles_of(entry: Entry) -> Tiles | None:
    return None if entry is None else Tiles(*entry)


@dataclass(frozen=True, slots=True)
class Fp8Tiles:
    """Tiles of a product with an FP8 weight, by the dtype of its input."""

    rows: TilesByRows
    """Input in FP8 with one scale per row. None: cuBLASLt's scaled product."""
    wide: TilesByRows = NO_TILES
    """Input in the model's dtype, which only gemv takes. None: the input is quantised first."""


def measured_fp8(weight: Tensor) -> Fp8Tiles:
    return Fp8Tiles(measured("fp8", weight), measured("fp8_wide", weight))


def nearest(table: Mapping[tuple[int, int], Mapping[int, T]], outputs: int, inputs: int) -> Mapping[int, T]:
    """The entries of the nearest size; nothing if outputs or inputs of every size differ by more than
    MAX_SIZE_RATIO."""
    if (outputs, inputs) in table:
        return table[outputs, inputs]
    if inputs % 16:
        return {}  # weight rows do not start at multiples of 16 bytes

    def distance(size: tuple[int, int]) -> float:
        return max(abs(math.log(size[0] / outputs)), abs(math.log(size[1] / inputs)))

    best = min(table, key=distance, default=None)
    return {} if best is None or distance(best) > math.log(MAX_SIZE_RATIO) else table[best]


def invariant(rows: int, weight: Tensor) -> Tiles:
    """Split by the weight's size alone; the number of rows decides only which parts run in parallel."""
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
