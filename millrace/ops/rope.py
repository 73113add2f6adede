"""Rotary positions, halves paired (x[i] with x[i + r/2]), applied to the first `r` dimensions of each head.

The angles of a step are computed once per RoPE variant and shared by all layers: `rope_rows`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rope_rows(positions: Tensor, inv_freq: Tensor, attention_factor: float) -> Tensor:
    """[T, r] float32: the cosines of the r/2 angles of each position, then the sines, both scaled."""
    angles = positions.float()[:, None] * inv_freq
    rows = torch.cat((angles.cos(), angles.sin()), dim=-1)
    return rows if attention_factor == 1.0 else rows * attention_factor


def rope(x: Tensor, rows: Tensor) -> Tensor:
    """Rotate heads x [T, heads, head_dim] by their tokens' rows, in float32, rounded once."""
    rotary_dim = rows.shape[-1]
    half = rotary_dim // 2
    cos, sin = rows[:, None, :half], rows[:, None, half:]
    wide = x.float()
    first, second, rest = wide[..., :half], wide[..., half:rotary_dim], wide[..., rotary_dim:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).to(x.dtype)
