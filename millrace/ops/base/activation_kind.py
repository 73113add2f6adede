"""Names of the activation functions that gated MLPs use."""

from __future__ import annotations

from typing import Literal

Activation = Literal["silu", "gelu_tanh", "gelu"]
