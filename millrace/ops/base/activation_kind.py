"""The activation functions of MLPs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh", "gelu", "relu", "relu2"]
"""`relu2`: the square of ReLU. The last two are for MLPs without gates."""


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """gate · sigmoid(slope · gate) · (up + 1), with gate at most `limit` and up within ± `limit` (gpt-oss)."""

    slope: float
    limit: float


ExpertActivation = Activation | ClampedSwiglu
