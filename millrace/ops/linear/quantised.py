"""Numbers in eight bits with a scale: what they mean, and the reference that makes them.

Activations have one scale per token, found as they come; weights one per output, found when they are loaded. A value is
its eight-bit number times its scale, and the largest of a row takes the largest number there is.
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

_SLICE_ITEMS = 1 << 24
"""Weights are widened to float32 this many items at a time, so that loading needs little beside the matrix itself."""


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
    """The reference: scale = amax / 448 of each row, value = x / scale; a row of zeros has the scale one."""
    wide = x.float()
    largest = wide.abs().amax(dim=1)
    scales = torch.where(largest > 0, largest / FP8_MAX, torch.ones_like(largest))
    return Quantised((wide / scales[:, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8), scales)


def quantise_weight(weight: Tensor) -> Quantised:
    """A weight [N, K] with one scale per output, slice by slice."""
    outputs, inputs = weight.shape
    values = torch.empty((outputs, inputs), dtype=FP8, device=weight.device)
    scales = torch.empty(outputs, dtype=torch.float32, device=weight.device)
    step = max(1, _SLICE_ITEMS // inputs)
    for start in range(0, outputs, step):
        rows = slice(start, start + step)
        part = quantise_rows(weight[rows])
        values[rows], scales[rows] = part.values, part.scales
    return Quantised(values, scales)


def with_quantise(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a keyword `quantise`: its result, or the first of its results, as `Quantised` where asked.

    Versions that fuse this take the keyword themselves and are returned as they are.
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
