"""What a runner declares to the engine once it is made."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field

from millrace.plan.shapes.declared import DeclaredShapes, OwnSizes


@dataclass(frozen=True, slots=True)
class RunnerFacts:
    steps_in_flight: int = 2
    """One is planned and launched while the one before runs."""
    ring_size: int | None = None
    """Buffers in which steps take turns; None if every step has its own. More than the steps in flight: a buffer is
    written again only when its step has completed."""
    slow_step_s: float = math.inf
    """After a step as long as this, the next one is planned only when the last one has ended."""
    min_jump: int = 1
    """Draws that must be saved before tokens forced by a grammar are appended at once."""
    max_jump_rows: int = sys.maxsize
    """In steps of more rows nothing is appended."""
    takes_forced: bool = False
    """Forced tokens that are not appended go with the next plan, as drafts."""
    verifies_adjusted: bool = True
    """Rows with penalties, a bias or log-probabilities can have drafts: their logits are adjusted at every place."""
    shapes: DeclaredShapes = field(default_factory=OwnSizes)
    """The shapes of steps, and which of them fit one. By default every step runs at its own size."""

    def __post_init__(self) -> None:
        if self.ring_size is not None and self.steps_in_flight >= self.ring_size:
            raise ValueError(
                f"{self.steps_in_flight} steps in flight need a ring of more than {self.ring_size} buffers"
            )
