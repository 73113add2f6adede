"""Whether a request would get its first token in time, forecast from what the engine last reported.

A request that would not is refused at once, with the time after which the same forecast would let it in. The queue is
bounded, and the less urgent a class, the less of it that class may fill: batch is shed first.
"""

from __future__ import annotations

from dataclasses import dataclass

from millrace.config import Config
from millrace.errors import Overloaded
from millrace.link.messages import EngineStats

CLASS_NAMES = ("interactive", "standard", "batch")
QUEUE_SHARES = (1.0, 0.9, 0.5)
"""How much of the queue may be filled when a request of the class still joins it."""
LONGEST_RETRY_S = 600.0
LEAST_SHARE = 0.1
"""Of the seats that a class gets in the end, however many more urgent requests come: waiting makes urgent."""
LEAST_RATE = 0.05
"""Seats per second that are assumed before any were measured."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a new request would meet."""

    ahead: int
    """Sequences that wait and would be seated first."""
    ttft_s: float
    seats_per_s: float


class Admission:
    def __init__(self, config: Config) -> None:
        server = config.server
        self._objectives_s = (server.ttft_interactive_s, server.ttft_standard_s, server.ttft_batch_s)
        self._max_waiting = config.plan.max_waiting

    def check(self, stats: EngineStats | None, unreported: int, priority: int, num_sequences: int) -> None:
        """Raises `Overloaded` when a request of this class should not join now."""
        if stats is None:
            return
        outlook = forecast(stats, unreported, priority)
        self._check_room(stats, unreported, priority, num_sequences, outlook)
        objective_s = self._objectives_s[priority]
        if objective_s and outlook.ttft_s > objective_s:
            retry_s = _bounded(outlook.ttft_s - objective_s)
            raise Overloaded(
                f"A request of class {CLASS_NAMES[priority]!r} would wait about {outlook.ttft_s:.1f} s for its first"
                f" token, more than the {objective_s:g} s that this class is promised; retry in {retry_s:.0f} s.",
                retry_after_s=retry_s,
            )

    def _check_room(
        self, stats: EngineStats, unreported: int, priority: int, num_sequences: int, outlook: Outlook
    ) -> None:
        share = int(self._max_waiting * QUEUE_SHARES[priority])
        waiting = max(0, stats.waiting + unreported - stats.rows_free)
        excess = waiting + num_sequences - share
        if excess > 0 and waiting > 0:
            retry_s = _bounded(excess / outlook.seats_per_s)
            raise Overloaded(
                f"{waiting} sequences wait, and class {CLASS_NAMES[priority]!r} may fill the queue up to {share};"
                f" retry in {retry_s:.0f} s.",
                retry_after_s=retry_s,
            )


def forecast(stats: EngineStats, unreported: int, priority: int) -> Outlook:
    """Those ahead are seated at the rate at which rows and memory become free, and their tokens computed first."""
    # Of the next class those go first that have waited for long.
    aged = sum(stats.aged_by_class[priority + 1 : priority + 2])
    ahead = sum(stats.waiting_by_class[: priority + 1]) + aged + unreported
    # Whoever is more urgent and comes later goes first, too; a part of the seats is always left.
    more_urgent = sum(stats.arrivals_per_s[:priority])
    rate = max(stats.seats_per_s - more_urgent, LEAST_SHARE * stats.seats_per_s, LEAST_RATE)
    beyond_rows = max(0, ahead - stats.rows_free)
    seat_s = beyond_rows / rate if stats.seats_per_s else 0.0
    tokens = sum(stats.waiting_tokens[: priority + 1])
    compute_s = tokens / stats.tokens_per_s if stats.tokens_per_s else 0.0
    return Outlook(ahead, max(seat_s, compute_s), rate)


def _bounded(seconds: float) -> float:
    return min(max(1.0, seconds), LONGEST_RETRY_S)
