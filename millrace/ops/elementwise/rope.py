"""Rotary position embedding over the first `r` dimensions of each head; x[i] is paired with x[i + r/2].

`rope_angles` computes the cosines and sines of a step once per RoPE variant; all layers share them.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rope_angles(positions: Tensor, inv_freq: Tensor, attention_factor: float) -> Tensor:
    """float32 [T, r]: the cosines of each position's r/2 angles, then the sines, both times `attention_factor`."""
    angles = positions.float()[:, None] * inv_freq
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    return cos_sin if attention_factor == 1.0 else cos_sin * attention_factor


def rope(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate x [T, heads, head_dim] by `angles` from `rope_angles`; computed in float32, rounded once."""
    rotary_dim = angles.shape[-1]
    half = rotary_dim // 2
    cos, sin = angles[:, None, :half], angles[:, None, half:]
    wide = x.float()
    first, second, rest = wide[..., :half], wide[..., half:rotary_dim], wide[..., rotary_dim:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).to(x.dtype)
