"""Says how far a long drill is, and when it will be over."""

from __future__ import annotations

import time
from collections.abc import Callable

FIRST_AFTER = 3
"""Kills after which the first estimate is made."""
EVERY_S = 60.0


class Pace:
    def __init__(self, num_kills: int, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        """`num_kills`: 0 if time says when the drill is over."""
        self._num_kills, self._say, self._clock = num_kills, say, clock
        self._began, self._said_at = clock(), 0.0

    def done(self, count: int) -> None:
        """So many kills are over."""
        now = self._clock()
        is_time = not self._said_at or now - self._said_at >= EVERY_S
        if FIRST_AFTER <= count < self._num_kills and is_time:
            self._said_at = now
            left_s = (now - self._began) / count * (self._num_kills - count)
            self._say(f"{count} of {self._num_kills} kills; about {left_s / 60:.0f} min left.")
