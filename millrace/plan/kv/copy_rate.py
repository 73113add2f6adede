"""The measured rate of copies between two locations."""

from __future__ import annotations

DECAY = 0.9
"""By how much older batches count less."""


class CopyRate:
    def __init__(self) -> None:
        self._bytes, self._seconds = 0.0, 0.0
        """Sums over batches, older ones counted less."""

    def add(self, num_bytes: int, seconds: float) -> None:
        self._bytes = DECAY * self._bytes + num_bytes
        self._seconds = DECAY * self._seconds + seconds

    @property
    def is_known(self) -> bool:
        return self._bytes > 0

    def seconds(self, num_bytes: int) -> float:
        """How long copies of this size take; 0 before any was measured."""
        return num_bytes * self._seconds / self._bytes if self._bytes else 0.0

    def forget(self) -> None:
        self._bytes = self._seconds = 0.0
