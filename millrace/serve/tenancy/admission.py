"""Admission control: refuse a request that would wait too long for its first token, or that finds the queue full.

The wait is forecast from the engine's last stats. A refusal says when the same forecast would admit the request. A less
urgent class may fill less of the queue, so batch requests are refused first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from millrace.config import Config
from millrace.errors import Overloaded
from millrace.link.engine_stats import EngineStats
from millrace.params.classes import CLASS_NAMES

INTERACTIVE, BATCH = CLASS_NAMES.index("interactive"), CLASS_NAMES.index("batch")
QUEUE_SHARES = (1.0, 0.9, 0.5)
"""Per class: the share of the queue beyond which its requests are refused."""
MAX_RETRY_S = 600.0
MIN_SHARE = 0.1
"""Share of all admissions that a class gets even under more urgent load, because waiting requests age."""
NUM_STEPS = 2
"""Steps from a request's admission to its first token: the rest of the running one, and its own."""
MIN_ADMISSIONS_PER_S = 0.05
"""Assumed admission rate until one is measured."""


@dataclass(frozen=True, slots=True)
class WaitForecast:
    """What a new request would have to wait for."""

    num_ahead: int
    """Waiting sequences that would be admitted first."""
    ttft_s: float
    admissions_per_s: float


class AdmissionControl:
    def __init__(self, config: Config) -> None:
        server = config.server
        self._objectives_s = (server.ttft_interactive_s, server.ttft_standard_s, server.ttft_batch_s)
        self._max_waiting = config.plan.max_waiting

    def check(self, stats: EngineStats | None, unreported: int, priority: int, num_sequences: int) -> None:
        """Raise `Overloaded` if a request of this class must not join the queue now."""
        if stats is None:
            return
        wait = forecast(stats, unreported, priority)
        self._check_room(stats, unreported, priority, num_sequences, wait)
        objective_s = self._objectives_s[priority]
        if objective_s and wait.ttft_s > objective_s:
            retry_s = _bounded(wait.ttft_s - objective_s)
            raise Overloaded(
                f"A request of class {CLASS_NAMES[priority]!r} would wait about {wait.ttft_s:.1f} s for its first"
                f" token; the limit of this class is {objective_s:g} s. Retry in {retry_s:.0f} s.",
                retry_after_s=retry_s,
            )

    def _check_room(
        self, stats: EngineStats, unreported: int, priority: int, num_sequences: int, wait: WaitForecast
    ) -> None:
        share = int(self._max_waiting * QUEUE_SHARES[priority])
        waiting = max(0, stats.waiting + unreported - stats.rows_free)
        excess = waiting + num_sequences - share
        if excess > 0 and waiting > 0:
            retry_s = _bounded(excess / wait.admissions_per_s)
            raise Overloaded(
                f"The queue holds {waiting} sequences; class {CLASS_NAMES[priority]!r} may fill it up to {share}."
                f" Retry in {retry_s:.0f} s.",
                retry_after_s=retry_s,
            )


def forecast(stats: EngineStats, unreported: int, priority: int) -> WaitForecast:
    """Requests ahead are admitted as rows and memory become free, and their tokens are computed first, after those of
    running prompts. The step that runs now and the request's own steps come on top. Running prompts alone are no wait,
    nor are those with a queue of less than these steps, such as copies that reuse their prefix."""
    # Requests of the next class that have aged into this one go first.
    aged = sum(stats.aged_by_class[priority + 1 : priority + 2])
    num_ahead = sum(stats.waiting_by_class[: priority + 1]) + aged + unreported
    # More urgent requests that arrive later go first too, but this class keeps its minimum share.
    more_urgent = sum(stats.arrivals_per_s[:priority])
    rate = max(stats.admissions_per_s - more_urgent, MIN_SHARE * stats.admissions_per_s, MIN_ADMISSIONS_PER_S)
    # Batch rows give way to interactive requests.
    rows_free = stats.rows_free + (stats.running_by_class[BATCH] if priority == INTERACTIVE else 0)
    beyond_rows = max(0, num_ahead + 1 - rows_free)
    # One standard deviation more than the mean, as if rows became free at random.
    admission_s = (beyond_rows + math.sqrt(beyond_rows)) / rate if stats.admissions_per_s else 0.0
    tokens = sum(stats.waiting_tokens[: priority + 1])
    running = sum(stats.running_prefill_tokens[: priority + 1])
    compute_s, running_s = (count / stats.tokens_per_s if stats.tokens_per_s else 0.0 for count in (tokens, running))
    steps_s = NUM_STEPS * stats.mean_step_s
    has_queue = admission_s > 0 or compute_s > steps_s
    return WaitForecast(num_ahead, max(admission_s, running_s + compute_s) + steps_s if has_queue else 0.0, rate)


def _bounded(seconds: float) -> float:
    return min(max(1.0, seconds), MAX_RETRY_S)
