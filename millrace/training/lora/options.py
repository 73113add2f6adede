"""What `millrace train-adapter` was asked to do, as one value."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class AdapterOptions:
    output: Path
    data: Path
    resume: bool = False
    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: tuple[str, ...] = TARGETS
    uses_rslora: bool = False
    max_tokens: int = 1024
    """Longer examples are left out."""
    epochs: float = 3.0
    minutes: float = 0.0
    """Training stops after this time, and the learning rate follows it; 0: no limit."""
    batch_tokens: int = 0
    """Tokens per optimiser step; 0 chooses by device."""
    learning_rate: float = 2e-4
    save_every: int = 100
    """Steps between checkpoints."""
    seed: int = 0

    @property
    def kind(self) -> str:
        return "adapter"

    @property
    def peak_rate(self) -> float:
        return self.learning_rate

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.uses_rslora else self.rank)
