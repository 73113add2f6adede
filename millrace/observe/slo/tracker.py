"""Follows objectives while serving: burn rates over several windows, the error budget that is left and what used it.

Latencies are counted from the engine's histograms, which are the same at every front; errors by each front, so reports
add what the others counted. There is one record per minute for three days, then one per hour for thirty. Each has the
sums before it, so a window is a difference and a report does not read all records.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from millrace.link.engine_stats import EngineStats
from millrace.observe import histograms
from millrace.observe.histograms import SPECS, Floats, Histograms, share_within
from millrace.observe.slo.objective import ERRORS, Objective

WINDOWS_S = {"5m": 300, "30m": 1800, "1h": 3600, "6h": 21600, "3d": 259200, "30d": 2592000}
BUDGET_WINDOW = "30d"
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
HOUR_S = 3600
WindowCounts = dict[str, tuple[float, float]]
"""Good and all values by window."""
MAX_USERS = 3
NO_ADAPTERS: Mapping[str, tuple[int, int]] = {}


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
    _last_failed: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Failed and all requests at the last sample: of all, by the empty name, and by adapter."""
    _is_restored: bool = False
    good: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    """Since counting began: stored sums go on after a restart."""

    def __post_init__(self) -> None:
        self.good = [0.0] * len(self.objectives)
        self.total = [0.0] * len(self.objectives)
        self._worst = [[] for _ in self.objectives]

    def sample(
        self,
        now: float,
        stats: EngineStats | None,
        asked: int = 0,
        failed: int = 0,
        of_adapters: Mapping[str, tuple[int, int]] = NO_ADAPTERS,
    ) -> None:
        """Called each second with the engine's last report, and how many requests this front was asked and failed.
        `of_adapters`: the same by adapter."""
        if not self.objectives:
            return
        for name, (own_asked, own_failed) in {"": (asked, failed), **of_adapters}.items():
            self._count_errors(now, name, own_asked, own_failed)
        if stats is not None and stats.histograms and stats is not self._last:
            self._count_latencies(now, stats)

    def _count_errors(self, now: float, adapter: str, asked: int, failed: int) -> None:
        before, self._last_failed[adapter] = self._last_failed.get(adapter, (0, 0)), (failed, asked)
        more_failed, more_asked = failed - before[0], asked - before[1]
        if not more_asked:
            return
        minute = self._minute(now)
        for index, objective in enumerate(self.objectives):
            if objective.is_about_errors and objective.adapter == adapter:
                self._add(minute, index, more_asked - more_failed, more_asked)

    def _add(self, minute: Minute, index: int, good: float, total: float) -> None:
        minute.good[index] += good
        minute.total[index] += total
        self.good[index] += good
        self.total[index] += total

    def _count_latencies(self, now: float, stats: EngineStats) -> None:
        before, self._last = self._last, stats
        if before is None and self._is_restored:
            return  # The stored counts may include what this engine did before.
        restarted = before is None or before.step_no > stats.step_no
        known = None if restarted else before
        change = _change(stats.histograms, known.histograms if known is not None else b"")
        of_adapters = {
            name: _change(data, known.adapter_histograms.get(name, b"") if known is not None else b"")
            for name, data in stats.adapter_histograms.items()
        }
        # What the engine did before this front started is counted, but it did not happen in this minute.
        minute = self._minute(now) if before is not None else self._new_minute(now)
        for index, objective in enumerate(self.objectives):
            if objective.is_about_errors:
                continue
            kind, own = _KINDS[objective.metric], of_adapters.get(objective.adapter) if objective.adapter else change
            if own is None:
                continue  # The model takes no adapters.
            chosen = own[kind, objective.priority] if objective.priority is not None else own[kind].sum(axis=0)
            total = float(chosen[:-1].sum())
            good = min(total, share_within(SPECS[kind], chosen[:-1], objective.limit_s))
            self._add(minute, index, good, total)
        minute.queue_s += float(change[histograms.QUEUE, :, -1].sum())
        minute.prefill_s += float(change[histograms.PREFILL, :, -1].sum())
        minute.preemptions += stats.preemptions - (known.preemptions if known is not None else 0)
        minute.prefill_tokens += stats.prefill_tokens - (known.prefill_tokens if known is not None else 0)

    def _minute(self, now: float) -> Minute:
        start = now // MINUTE_S * MINUTE_S
        if not self._minutes or self._minutes[-1].start < start:
            self._worst = [self._most_used(index, self._minutes) for index in range(len(self.objectives))]
            self._minutes.append(self._new_minute(start))
            self._thin(now)
        return self._minutes[-1]

    def _thin(self, now: float) -> None:
        """Keep one record per hour before the last three days, and none before the last thirty."""
        fine = bisect.bisect_left(self._minutes, now - WINDOWS_S["3d"], key=lambda minute: minute.start)
        kept: list[Minute] = []
        for minute in self._minutes[:fine]:
            is_first = not kept or kept[-1].start // HOUR_S < minute.start // HOUR_S
            if is_first and minute.start >= now - WINDOWS_S[BUDGET_WINDOW] - HOUR_S:
                kept.append(minute)
        self._minutes[:fine] = kept

    def _new_minute(self, start: float) -> Minute:
        num = len(self.objectives)
        return Minute(start, list(self.good), list(self.total), [0.0] * num, [0.0] * num)

    # -- kept across restarts --------------------------------------------------------------------------------------

    def stored(self) -> dict[str, Any]:
        """What `restore` takes, as plain data: per objective the sums before each record, and the last ones."""
        starts = [minute.start for minute in self._minutes]
        return {
            str(objective): {
                "starts": starts,
                "good": [*(minute.good_before[index] for minute in self._minutes), self.good[index]],
                "total": [*(minute.total_before[index] for minute in self._minutes), self.total[index]],
            }
            for index, objective in enumerate(self.objectives)
        }

    def restore(self, stored: dict[str, Any]) -> None:
        """Before the first sample: take over the counts of an earlier run, of objectives that are still followed."""
        self._is_restored = True
        known = [stored.get(str(objective)) for objective in self.objectives]
        starts = sorted({start for one in known if one is not None for start in one["starts"]})
        columns = [_at(one, starts) for one in known]
        for number, start in enumerate(starts):
            good, total = ([column[number] for column in kind] for kind in zip(*columns, strict=True))
            next_good, next_total = ([column[number + 1] for column in kind] for kind in zip(*columns, strict=True))
            more_good, more_total = _differences(next_good, good), _differences(next_total, total)
            self._minutes.append(Minute(start, good, total, more_good, more_total))
        if columns:
            self.good, self.total = ([column[-1] for column in kind] for kind in zip(*columns, strict=True))

    def _counts(self, index: int, window_s: int, now: float) -> tuple[float, float]:
        """Good and all values of a window."""
        first = bisect.bisect_right(self._minutes, now - window_s - MINUTE_S, key=lambda minute: minute.start)
        if first == len(self._minutes):
            return 0.0, 0.0
        before = self._minutes[first]
        return self.good[index] - before.good_before[index], self.total[index] - before.total_before[index]

    def burn_rate(self, index: int, window_s: int, now: float) -> float:
        """Share of values beyond the limit, over the share that the objective allows; 0 without values."""
        return self._burn(index, *self._counts(index, window_s, now))

    def _burn(self, index: int, good: float, total: float) -> float:
        allowed = 1 - self.objectives[index].share
        return (total - good) / total / allowed if total and allowed else 0.0

    def is_burning(self, index: int, now: float) -> bool:
        """True if the budget is being used up fast, now and over the last hour."""
        return self._is_burning(index, {name: self._counts(index, WINDOWS_S[name], now) for name in ("5m", "1h")})

    def _is_burning(self, index: int, counts: WindowCounts) -> bool:
        if counts["5m"][1] < MIN_VALUES:
            return False
        return all(self._burn(index, *counts[name]) > self._fast(index) for name in ("5m", "1h"))

    def _fast(self, index: int) -> float:
        """A burn rate cannot exceed 1 / (1 - share): loose objectives burn fast at half of that."""
        return min(FAST_BURN, 0.5 / (1 - self.objectives[index].share))

    def burning(self, now: float) -> list[Objective]:
        return [one for index, one in enumerate(self.objectives) if self.is_burning(index, now)]

    def error_counts(self, now: float) -> dict[str, WindowCounts]:
        """By name of each objective about errors: what this front counted."""
        return {
            objective.name: {name: self._counts(index, seconds, now) for name, seconds in WINDOWS_S.items()}
            for index, objective in enumerate(self.objectives)
            if objective.is_about_errors
        }

    def report(self, now: float, others: Sequence[dict[str, WindowCounts]] = ()) -> list[dict[str, Any]]:
        """`others`: the `error_counts` of other fronts."""
        return [self._report_one(index, objective, now, others) for index, objective in enumerate(self.objectives)]

    def _report_one(
        self, index: int, objective: Objective, now: float, others: Sequence[dict[str, WindowCounts]]
    ) -> dict[str, Any]:
        counts = {name: self._counts(index, seconds, now) for name, seconds in WINDOWS_S.items()}
        for other in others:
            for name, (good, total) in other.get(objective.name, {}).items():
                counts[name] = counts[name][0] + good, counts[name][1] + total
        good, total = counts[BUDGET_WINDOW]
        allowed = (1 - objective.share) * total
        return {
            "slo": str(objective),
            "name": objective.name,
            "class": objective.class_name,
            "adapter": objective.adapter,
            "objective": objective.share,
            "limit_s": None if objective.is_about_errors else objective.limit_s,
            "good": round(good),
            "total": round(total),
            "window": BUDGET_WINDOW,
            "is_met": not total or good >= objective.share * total - 1e-9,
            "budget_left": 1 - (total - good) / allowed if allowed else 1.0,
            "burn": {name: self._burn(index, *one) for name, one in counts.items()},
            "is_burning": self._is_burning(index, counts),
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


def _change(after: bytes, before: bytes) -> Floats:
    return Histograms(after).values - Histograms(before).values


def _differences(after: list[float], before: list[float]) -> list[float]:
    return [one - other for one, other in zip(after, before, strict=True)]


def _at(stored: dict[str, Any] | None, starts: list[float]) -> tuple[Sequence[float], Sequence[float]]:
    """Sums before each of these records and after the last; zeros for an objective that was not followed."""
    if stored is None:
        return [0.0] * (len(starts) + 1), [0.0] * (len(starts) + 1)
    places = [bisect.bisect_left(stored["starts"], start) for start in starts]
    return tuple([*(stored[name][place] for place in places), stored[name][-1]] for name in ("good", "total"))  # type: ignore[return-value]


def _cause(minute: Minute, metric: str) -> str:
    if metric == ERRORS:
        return "failed requests"
    if minute.preemptions:
        return f"{minute.preemptions} preemptions"
    if metric in ("itl", "tpot"):
        return f"{minute.prefill_tokens} prompt tokens computed beside" if minute.prefill_tokens else "slow steps"
    if minute.queue_s > minute.prefill_s:
        return "waiting in the queue"
    return "computing prompts" if minute.prefill_s else "decoding"
