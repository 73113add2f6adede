"""FP8 tensors with scales: their meaning, and the reference that quantises.

Activations have one scale per token, computed in the step; weights have one per output, computed at load. A value is
its FP8 number times its scale; the largest value of a row maps to the largest finite FP8 number.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""The largest finite float8_e4m3fn."""

SLICE_ITEMS = 1 << 24
"""Weights are widened to float32 in slices of this many items, to bound the extra memory while loading."""


@dataclass(frozen=True, slots=True)
class Quantised:
    """Activations [T, K]: `values` float8 [T, K], `scales` float32 [T]."""

    values: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def widen(self) -> Tensor:
        """float32 [T, K]"""
        return self.values.float() * self.scales[:, None]


def quantise_rows(x: Tensor) -> Quantised:
    """The reference: scale = amax / 448 of each row, value = x / scale; a row of zeros has scale 1."""
    wide = x.float()
    largest = wide.abs().amax(dim=1)
    scales = torch.where(largest > 0, largest / FP8_MAX, torch.ones_like(largest))
    return Quantised((wide / scales[:, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8), scales)


def quantise_weight(weight: Tensor) -> Quantised:
    """Quantise a weight [N, K] with one scale per output, slice by slice."""
    outputs, inputs = weight.shape
    values = torch.empty((outputs, inputs), dtype=FP8, device=weight.device)
    scales = torch.empty(outputs, dtype=torch.float32, device=weight.device)
    step = max(1, SLICE_ITEMS // inputs)
    for start in range(0, outputs, step):
        rows = slice(start, start + step)
        part = quantise_rows(weight[rows])
        values[rows], scales[rows] = part.values, part.scales
    return Quantised(values, scales)


def with_quantise(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add a keyword `quantise` to the function: if true, its (first) result is returned as `Quantised`.

    A function that already takes the keyword is returned unchanged.
    """
    if "quantise" in inspect.signature(function).parameters:
        return function

    def quantising(*args: Any, quantise: bool = False) -> Any:
        result = function(*args)
        if not quantise:
            return result
        if isinstance(result, tuple):
            return quantise_rows(result[0]), *result[1:]
        return quantise_rows(result)

    return quantising
