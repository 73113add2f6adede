"""Rotary tables: cosines and sines of every position, one table per rope, computed once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from millrace.models.spec.model_spec import RopeSpec
from millrace.ops.elementwise.rope import rope_angles

FIRST_POSITIONS = 1024
"""Initial number of positions; doubled when a longer context needs it."""


class Angles:
    def __init__(self, ropes: Sequence[RopeSpec], frequencies: Sequence[Tensor]) -> None:
        """`frequencies`: inverse frequencies of each rope, float32 [rotary_dim / 2]."""
        self._ropes = [(rope.attention_factor, own) for rope, own in zip(ropes, frequencies, strict=True)]
        self._num_positions = 0
        self._tables: list[Tensor] = []

    def of(self, positions: Tensor) -> list[Tensor]:
        """Per rope float32 [T, rotary_dim], computed for positions [T]."""
        return [rope_angles(positions, frequencies, factor) for factor, frequencies in self._ropes]

    def turns(self, distance: int) -> list[Tensor]:
        """Per rope float32 [1, rotary_dim]: by how much a key turns when its token moves by so many positions."""
        at = [torch.full((1,), distance, device=frequencies.device) for _, frequencies in self._ropes]
        return [rope_angles(own, frequencies, 1.0) for own, (_, frequencies) in zip(at, self._ropes, strict=True)]

    def upto(self, num_positions: int) -> list[Tensor]:
        """Per rope float32 [at least num_positions, rotary_dim], bit-equal to `of`. The tables do not move until more
        positions are needed than they hold."""
        if num_positions > self._num_positions:
            while num_positions > self._num_positions:
                self._num_positions = max(FIRST_POSITIONS, 2 * self._num_positions)
            device = self._ropes[0][1].device if self._ropes else None
            self._tables = [rows.contiguous() for rows in self.of(torch.arange(self._num_positions, device=device))]
        return self._tables
