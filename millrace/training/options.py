"""What `millrace train-drafter` was asked to do, as one value, and what all trainings have of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

TrainedKind = Literal["eagle", "medusa", "draft"]

_LEARNING_RATES: dict[TrainedKind, float] = {"eagle": 1e-3, "medusa": 1e-3, "draft": 3e-4}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    """What the optimiser's loop reads, of whatever is trained."""

    output: Path
    resume: bool = False
    epochs: float = 4.0
    minutes: float = 0.0
    """Training stops after this time, and the learning rate follows it; 0: no limit."""
    batch_tokens: int = 0
    """Tokens per optimiser step; 0 chooses by device."""
    learning_rate: float = 0.0
    """Highest learning rate; 0 chooses by kind."""
    save_every: int = 200
    """Steps between checkpoints."""
    seed: int = 0
    kind: str

    @property
    def peak_rate(self) -> float:
        return self.learning_rate


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions(LoopOptions):
    kind: TrainedKind
    data: Path | None = None
    num_prompts: int = 0
    """At most this many prompts of `data`; 0: all."""
    self_prompts: int = 0
    """Prompts that the target writes itself."""
    answers_per_prompt: int = 1
    max_tokens: int = 256
    """Tokens per answer."""
    draft_vocabulary: int = 0
    """Tokens that the drafter can propose; 0: all."""
    depth: int = 4
    """Drafts per step that are trained and measured; Medusa heads."""
    num_layers: int = 4
    """Layers of a draft model."""

    @property
    def peak_rate(self) -> float:
        return self.learning_rate or _LEARNING_RATES[self.kind]


class Reporter(Protocol):
    """Shows progress. `total` 0: unknown."""

    def stage(self, what: str, total: int) -> None: ...

    def advance(self, count: int, note: str = "") -> None: ...

    def say(self, text: str) -> None: ...
