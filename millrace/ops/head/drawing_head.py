"""A head that finds each row's likeliest token by itself, and where tokens go that it draws."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor


@dataclass(frozen=True, slots=True)
class DrawnTokens:
    """Where tokens go that are drawn for rows of hidden states. All on the device."""

    rows: Tensor
    """int32 [T]: the table row of each; negative for padding, for which nothing is written."""
    out: Tensor
    """The tokens, from the place on that `out_start` [1] holds."""
    out_start: Tensor
    last_tokens: Tensor
    """The tokens again, each at its table row."""


@runtime_checkable
class DrawingHead(Protocol):
    """A head that can find each row's greatest score without writing the others."""

    def draws(self, rows: int) -> bool:
        """Whether that takes less time for so many rows."""
        ...

    def draw(self, x: Tensor, vocab_size: int, to: DrawnTokens) -> None:
        """The first token with the greatest score, of the first `vocab_size`, for each row of x, where `draws` says
        yes."""
        ...
