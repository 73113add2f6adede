"""Time that passes only when somebody spends it."""

from __future__ import annotations


class VirtualClock:
    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds

    def advance_to(self, time_s: float) -> None:
        """Time never goes back."""
        self._now = max(self._now, time_s)
