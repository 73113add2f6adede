"""Whether a replica gets requests: a circuit breaker with slow return. Time is an argument."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

State = Literal["starting", "healthy", "ejected", "returning"]
MAX_EJECT_FACTOR = 12
"""Ejections in a row double the time outside up to this factor."""
MIN_SLOW_MS = 50.0
"""A replica that is faster than this is slow to nobody, however fast the others are."""
FIRST_SHARE = 0.1
"""Share of its weight with which a replica returns."""


@dataclass(frozen=True, slots=True)
class HealthLimits:
    max_failures: int = 3
    """Failures in a row that eject a replica."""
    eject_s: float = 5.0
    ramp_s: float = 10.0
    """Time from the return to the full share."""


class Health:
    def __init__(self, limits: HealthLimits, on_eject: Callable[[str], object] = lambda reason: None) -> None:
        """`on_eject` is told the reason of each ejection."""
        self._limits = limits
        self._on_eject = on_eject
        self.state: State = "starting"
        self.reason = "not reached yet"
        self.num_ejections = 0
        self._failures = 0
        self._in_a_row = 0
        """Ejections without a full return between them."""
        self._until = 0.0
        self._returned_at = 0.0

    def succeeded(self, now: float) -> None:
        """A probe or a request was answered."""
        self._failures = 0
        if self.state == "starting":
            self.state, self.reason = "healthy", ""
        elif self.state == "ejected" and now >= self._until:
            self.state, self.reason, self._returned_at = "returning", "returns slowly", now
        elif self.state == "returning" and now >= self._returned_at + self._limits.ramp_s:
            self.state, self.reason, self._in_a_row = "healthy", "", 0

    def failed(self, now: float, reason: str) -> bool:
        """True if this ejects the replica. One failure is enough for a replica that is just returning."""
        self._failures += 1
        if self.state == "starting":
            self.reason = reason
            return False
        if self._failures < self._limits.max_failures and self.state != "returning":
            return False
        return self.eject(now, reason)

    def eject(self, now: float, reason: str) -> bool:
        """True if it was not ejected before."""
        was_out = self.state == "ejected"
        if not was_out:
            self._in_a_row += 1
            self.num_ejections += 1
            factor = min(2 ** (self._in_a_row - 1), MAX_EJECT_FACTOR)
            self._until = now + self._limits.eject_s * factor
            self._on_eject(reason)
        self.state, self.reason, self._failures = "ejected", reason, 0
        return not was_out

    def share(self, now: float) -> float:
        """0: no requests; 1: all of its weight."""
        if self.state in ("starting", "ejected"):
            return 0.0
        if self.state == "healthy":
            return 1.0
        risen = (now - self._returned_at) / self._limits.ramp_s if self._limits.ramp_s else 1.0
        return min(1.0, max(FIRST_SHARE, risen))


def slow_outliers(token_ms: Mapping[str, float], factor: float) -> list[str]:
    """Replicas whose time per token is at least `MIN_SLOW_MS` and more than `factor` times the median of the others.
    The slowest come first. At most half of the fleet: if most are slow, none is an outlier."""
    found: list[str] = []
    for name in sorted(token_ms, key=lambda name: -token_ms[name]):
        others = [value for other, value in token_ms.items() if other != name and other not in found]
        if len(others) < 2 or len(found) + 1 > len(token_ms) // 2:
            break
        if token_ms[name] >= MIN_SLOW_MS and token_ms[name] > factor * statistics.median(others):
            found.append(name)
    return found
