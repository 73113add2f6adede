"""Follows objectives while serving: burn rates over several windows, the error budget that is left and what used it.

Counts come from the engine's histograms, one record per minute for three days. Each record has the sums before it, so
a window is a difference and a report does not read all records.
"""

from __future__ import annotations

import bisect
import heapq
from dataclasses import dataclass, field
from typing import Any

from millrace.link.messages import EngineStats
from millrace.observe import histograms
from millrace.observe.histograms import SPECS, Histograms, share_within
from millrace.observe.slo.objective import Objective

WINDOWS_S = {"5m": 300, "30m": 1800, "1h": 3600, "6h": 21600, "3d": 259200}
FAST_BURN = 14.4
"""At this rate a budget of 30 days lasts two days; both the 5m and the 1h window must show it."""
_KINDS = {
    "ttft": histograms.TTFT,
    "itl": histograms.ITL,
    "tpot": histograms.TPOT,
    "queue": histograms.QUEUE,
    "e2e": histograms.SEQUENCE,
}
MIN_VALUES = 10
"""In the shortest window: one slow request does not burn a budget."""
MINUTE_S = 60
MAX_MINUTES = WINDOWS_S["3d"] // MINUTE_S
MAX_USERS = 3


@dataclass(slots=True)
class Minute:
    """Per objective the values that were within the limit, and all; and what went on meanwhile."""

    start: float
    """Unix seconds."""
    good_before: list[float]
    total_before: list[float]
    """Sums before this minute."""
    good: list[float]
    total: list[float]
    queue_s: float = 0.0
    prefill_s: float = 0.0
    """Sums over the requests that ended."""
    preemptions: int = 0
    prefill_tokens: int = 0


@dataclass(slots=True)
class SloTracker:
    objectives: tuple[Objective, ...]
    _minutes: list[Minute] = field(default_factory=list)
    _worst: list[list[Minute]] = field(default_factory=list)
    """Per objective the complete minutes that used most of the budget."""
    _last: EngineStats | None = None
    good: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    """Since this front started."""

    def __post_init__(self) -> None:
        self.good = [0.0] * len(self.objectives)
        self.total = [0.0] * len(self.objectives)
        self._worst = [[] for _ in self.objectives]

    def sample(self, now: float, stats: EngineStats | None) -> None:
        """Called each second with the engine's last report."""
        if not self.objectives or stats is None or not stats.histograms or stats is self._last:
            return
        before, self._last = self._last, stats
        counts = Histograms(stats.histograms).values
        restarted = before is None or before.step_no > stats.step_no
        old = Histograms(b"" if restarted or before is None else before.histograms).values
        change = counts - old
        # What the engine did before this front started is counted, but it did not happen in this minute.
        minute = self._minute(now) if before is not None else self._new_minute(now)
        for index, objective in enumerate(self.objectives):
            kind = _KINDS[objective.metric]
            chosen = change[kind, objective.priority] if objective.priority is not None else change[kind].sum(axis=0)
            total = float(chosen[:-1].sum())
            good = min(total, share_within(SPECS[kind], chosen[:-1], objective.limit_s))
            minute.good[index] += good
            minute.total[index] += total
            self.good[index] += good
            self.total[index] += total
        minute.queue_s += float(change[histograms.QUEUE, :, -1].sum())
        minute.prefill_s += float(change[histograms.PREFILL, :, -1].sum())
        minute.preemptions += stats.preemptions - (0 if restarted or before is None else before.preemptions)
        minute.prefill_tokens += stats.prefill_tokens - (0 if restarted or before is None else before.prefill_tokens)

    def _minute(self, now: float) -> Minute:
        start = now // MINUTE_S * MINUTE_S
        if not self._minutes or self._minutes[-1].start < start:
            self._worst = [self._most_used(index, self._minutes) for index in range(len(self.objectives))]
            self._minutes.append(self._new_minute(start))
            del self._minutes[:-MAX_MINUTES]
        return self._minutes[-1]

    def _new_minute(self, start: float) -> Minute:
        num = len(self.objectives)
        return Minute(start, list(self.good), list(self.total), [0.0] * num, [0.0] * num)

    def _counts(self, index: int, window_s: int, now: float) -> tuple[float, float]:
        """Good and all values of a window."""
        first = bisect.bisect_right(self._minutes, now - window_s - MINUTE_S, key=lambda minute: minute.start)
        if first == len(self._minutes):
            return 0.0, 0.0
        before = self._minutes[first]
        return self.good[index] - before.good_before[index], self.total[index] - before.total_before[index]

    def burn_rate(self, index: int, window_s: int, now: float) -> float:
        """Share of values beyond the limit, over the share that the objective allows; 0 without values."""
        good, total = self._counts(index, window_s, now)
        allowed = 1 - self.objectives[index].share
        return (total - good) / total / allowed if total and allowed else 0.0

    def is_burning(self, index: int, now: float) -> bool:
        """True if the budget is being used up fast, now and over the last hour."""
        if self._counts(index, WINDOWS_S["5m"], now)[1] < MIN_VALUES:
            return False
        return all(self.burn_rate(index, WINDOWS_S[name], now) > self._fast(index) for name in ("5m", "1h"))

    def _fast(self, index: int) -> float:
        """A burn rate cannot exceed 1 / (1 - share): loose objectives burn fast at half of that."""
        return min(FAST_BURN, 0.5 / (1 - self.objectives[index].share))

    def burning(self, now: float) -> list[Objective]:
        return [one for index, one in enumerate(self.objectives) if self.is_burning(index, now)]

    def report(self, now: float) -> list[dict[str, Any]]:
        return [self._report_one(index, objective, now) for index, objective in enumerate(self.objectives)]

    def _report_one(self, index: int, objective: Objective, now: float) -> dict[str, Any]:
        good, total = self._counts(index, WINDOWS_S["3d"], now)
        allowed = (1 - objective.share) * total
        return {
            "slo": str(objective),
            "name": objective.name,
            "class": objective.class_name,
            "objective": objective.share,
            "limit_s": objective.limit_s,
            "good": round(good),
            "total": round(total),
            "is_met": not total or good >= objective.share * total,
            "budget_left": 1 - (total - good) / allowed if allowed else 1.0,
            "burn": {name: self.burn_rate(index, seconds, now) for name, seconds in WINDOWS_S.items()},
            "is_burning": self.is_burning(index, now),
            "used_by": self._used_by(index),
        }

    def _most_used(self, index: int, minutes: list[Minute]) -> list[Minute]:
        return heapq.nsmallest(MAX_USERS, minutes, key=lambda minute: minute.good[index] - minute.total[index])

    def _used_by(self, index: int) -> list[dict[str, Any]]:
        """The minutes that used most of the budget, and what took the time in them."""
        worst = self._most_used(index, [*self._worst[index], *self._minutes[-1:]])
        return [
            {
                "time": minute.start,
                "beyond_limit": round(bad),
                "of": round(minute.total[index]),
                "cause": _cause(minute, self.objectives[index].metric),
            }
            for minute in worst
            if (bad := minute.total[index] - minute.good[index]) >= 0.5
        ]


def _cause(minute: Minute, metric: str) -> str:
    if minute.preemptions:
        return f"{minute.preemptions} preemptions"
    if metric in ("itl", "tpot"):
        return f"{minute.prefill_tokens} prompt tokens computed beside" if minute.prefill_tokens else "slow steps"
    if minute.queue_s > minute.prefill_s:
        return "waiting in the queue"
    return "computing prompts" if minute.prefill_s else "decoding"
