"""How the experts of a token are chosen and weighted. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Routing:
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """What a router's logits become. With `sigmoid` each expert has a bias, added for the choice, not to its weight."""
    num_groups: int = 1
    """Groups of equally many consecutive experts."""
    top_groups: int = 1
    """Groups that a token's experts are chosen from: the best by their best expert or, with `sigmoid`, by the sum of
    their two best."""
    scale: float = 1.0
    """Multiplies the weights."""


PLAIN_ROUTING = Routing()
"""The most likely experts of all."""
