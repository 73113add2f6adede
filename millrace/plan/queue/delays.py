"""What kept the queue from moving, as seconds per cause, so that a request can say why it waited without anybody
counting per request: it notes the totals when it comes and again when it is seated."""

from __future__ import annotations

from typing import Literal

Cause = Literal["none", "rows", "memory", "budget", "prefix"]
CAUSES: tuple[Cause, ...] = ("none", "rows", "memory", "budget", "prefix")
"""none: nobody waited. rows: `max_running` requests ran. memory: the forecast found no room for its KV. budget: the
step's tokens were given to those ahead. prefix: another request was computing the same prefix."""

Totals = tuple[float, ...]


class Delays:
    def __init__(self) -> None:
        self._seconds = [0.0] * len(CAUSES)
        self._cause = 0
        self._since: float | None = None

    def note(self, cause: Cause, now: float) -> None:
        """From now on this keeps the head of the queue waiting. Seconds in which nobody waited are not counted."""
        if self._cause and self._since is not None:
            self._seconds[self._cause] += max(0.0, now - self._since)
        self._since = now
        self._cause = CAUSES.index(cause)

    def totals(self) -> Totals:
        return tuple(self._seconds)

    def since(self, before: Totals) -> dict[str, float]:
        """Seconds by cause that have passed since those totals were noted."""
        if self.totals() == before:
            return {}
        return {cause: now - then for cause, now, then in zip(CAUSES, self._seconds, before, strict=True) if now > then}
