"""What `millrace train-adapter` was asked to do, as one value."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from millrace.training.options import LoopOptions

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterOptions(LoopOptions):
    kind: str = "adapter"
    data: Path
    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: tuple[str, ...] = TARGETS
    uses_rslora: bool = False
    max_tokens: int = 1024
    """Longer examples are left out."""
    epochs: float = 3.0
    learning_rate: float = 2e-4
    save_every: int = 100

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.uses_rslora else self.rank)
