"""Seconds for which the queue was blocked, by cause.

A request learns why it waited from the difference of the totals between its arrival and its admission. No step does
per-request work for this.
"""

from __future__ import annotations

from typing import Literal

Cause = Literal["none", "rows", "memory", "budget", "prefix"]
CAUSES: tuple[Cause, ...] = ("none", "rows", "memory", "budget", "prefix")
"""none: no request waited. rows: `max_running` requests were running. memory: the admission forecast found no room.
budget: the token budget went to requests ahead. prefix: another request was computing the same prefix, or it was being
loaded from host memory."""

Totals = tuple[float, ...]


class Delays:
    def __init__(self) -> None:
        self._seconds = [0.0] * len(CAUSES)
        self._cause = 0
        self._since: float | None = None

    def note(self, cause: Cause, now: float) -> None:
        """From `now` on, `cause` blocks the head of the queue. Time with cause "none" is not counted."""
        if self._cause and self._since is not None:
            self._seconds[self._cause] += max(0.0, now - self._since)
        self._since = now
        self._cause = CAUSES.index(cause)

    def totals(self) -> Totals:
        return tuple(self._seconds)

    def since(self, before: Totals) -> dict[str, float]:
        """Seconds by cause since the totals were `before`."""
        if self.totals() == before:
            return {}
        return {cause: now - then for cause, now, then in zip(CAUSES, self._seconds, before, strict=True) if now > then}
