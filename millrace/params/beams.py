"""Parameters of a beam search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from millrace.params.ranges import in_range
from millrace.params.sampling import MAX_LOGPROBS


@dataclass(frozen=True, slots=True)
class BeamParams:
    """Beam search, as `transformers` defines it."""

    num_beams: int
    length_penalty: float = 1.0
    """Scores are divided by length ** length_penalty: above 0 favours long answers."""
    early_stopping: bool | Literal["never"] = False
    """True: end once there are `num_beams` finished beams. "never": only when no live beam can become better."""

    def __post_init__(self) -> None:
        in_range("num_beams", self.num_beams, 1, MAX_LOGPROBS)
        in_range("length_penalty", self.length_penalty, -100.0, 100.0)
