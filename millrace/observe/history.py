"""The last minutes of a front and its engine as samples, and time series read from them for dashboards.

A sample is taken each second and keeps counters as they were. A point of a series is the difference between the samples
at its two ends, so no sample is ever averaged away.
"""

from __future__ import annotations

import bisect
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from millrace.link.engine_stats import EngineStats
from millrace.observe import histograms
from millrace.observe.histograms import Floats, Integers, values_of
from millrace.observe.sketch import Sketch, quantile
from millrace.observe.token_use import CAUSES, token_use
from millrace.params.classes import CLASS_NAMES

SAMPLE_EVERY_S = 1.0
MAX_WINDOW_S = 900
MAX_POINTS = 900
PERCENTILES = (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))
SPREAD = ("n", *(label for label, _ in PERCENTILES))
MAX_POINTS_SHOWN = 60
"""Up to this many values of a window are given one by one."""
MAX_INTERVALS = 1024
"""Remembered points of series."""
_TIMES = {
    "ttft_s": histograms.TTFT,
    "itl_s": histograms.ITL,
    "tpot_s": histograms.TPOT,
    "queue_s": histograms.QUEUE,
    "e2e_s": histograms.SEQUENCE,
}
Points = list[float | None]


@dataclass(frozen=True, slots=True)
class FrontCounts:
    """Counters of one front since it started, and the worst event-loop lag since the sample before."""

    requests: int = 0
    errors: int = 0
    """Answers with a 5xx, and streams that ended with an error."""
    client_errors: int = 0
    """Answers with a 4xx, without refusals."""
    refused: int = 0
    loop_lag_s: float = 0.0
    asked: int = 0
    """Requests that asked for work."""
    failed: int = 0
    """Those of them that failed for a reason of the server."""


@dataclass(frozen=True, slots=True)
class Sample:
    time: float
    """Unix seconds."""
    stats: EngineStats | None
    front: FrontCounts
    latencies: Sketch = field(default_factory=Sketch)
    """Of requests and tokens since the sample before."""


@dataclass(frozen=True, slots=True)
class Interval:
    sketch: Sketch
    spreads: dict[str, dict[str, float | None]]
    """By metric: number and percentiles."""


class History:
    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=int(MAX_WINDOW_S / SAMPLE_EVERY_S) + 8)
        self._intervals: dict[tuple[float, float], Interval] = {}

    def add(self, sample: Sample) -> None:
        self._samples.append(sample)

    def all(self) -> list[Sample]:
        return list(self._samples)

    def at(self, times: list[float]) -> list[Sample | None]:
        """For each time the last sample taken by then; None if there is none."""
        samples = list(self._samples)
        taken = [sample.time for sample in samples]
        places = [bisect.bisect_right(taken, time) - 1 for time in times]
        return [samples[place] if place >= 0 else None for place in places]

    def between(self, first: float, last: float) -> list[Sample]:
        """Samples taken after `first`, up to `last`."""
        samples = self._samples
        low, high = (bisect.bisect_right(samples, time, key=lambda sample: sample.time) for time in (first, last))
        return list(itertools.islice(samples, low, high))

    def interval(self, first: float, last: float) -> Interval:
        """Latencies after `first`, up to `last`. Intervals that are over are remembered."""
        found = self._intervals.get((first, last))
        if found is None:
            sketch = Sketch()
            for sample in self.between(first, last):
                sketch.merge(sample.latencies)
            found = Interval(sketch, {name: _spread(*values_of(sketch, kind)) for name, kind in _TIMES.items()})
            if self._samples and self._samples[-1].time > last:
                self._intervals[first, last] = found
                if len(self._intervals) > MAX_INTERVALS:
                    del self._intervals[next(iter(self._intervals))]
        return found


def grid(now: float, window_s: int, step_s: int) -> list[float]:
    """Ends of the points, on multiples of the step, preceded by the beginning of the first point."""
    end = int(now // step_s) * step_s
    return [float(end - back * step_s) for back in range(window_s // step_s, -1, -1)]


def latency_series(history: History, ends: list[float]) -> dict[str, dict[str, Points]]:
    """Percentiles and number of the values between each two ends."""
    found = [history.interval(first, last).spreads for first, last in zip(ends, ends[1:], strict=False)]
    return {name: {key: [point[name][key] for point in found] for key in SPREAD} for name in _TIMES}


def window_latency(history: History, ends: list[float], now: float) -> dict[str, dict[str, Any]]:
    """By metric: number, percentiles and maximum of all values from the first end until now. If there are few, also
    each of them with its time, so that no percentile has to stand for them."""
    merged = Sketch()
    for first, last in zip(ends, [*ends[1:], now], strict=True):
        merged.merge(history.interval(first, last).sketch)
    found: dict[str, dict[str, Any]] = {}
    for name, kind in _TIMES.items():
        values, counts = values_of(merged, kind)
        found[name] = {**_spread(values, counts), "max": float(values[-1]) if len(values) else None}
        if counts.sum() <= MAX_POINTS_SHOWN:
            found[name]["points"] = [
                [round(sample.time, 3), value]
                for sample in history.between(ends[0], now)
                for value in np.repeat(*_whole(values_of(sample.latencies, kind))).tolist()
            ]
    return found


def _whole(column: tuple[Floats, Floats]) -> tuple[Floats, Integers]:
    return column[0], column[1].astype(np.int64)


def _spread(values: Floats, counts: Floats) -> dict[str, float | None]:
    return {"n": float(counts.sum()), **{label: quantile(values, counts, share) for label, share in PERCENTILES}}


def engine_series(samples: list[Sample | None], step_s: int) -> dict[str, Any]:
    """`samples`: at the ends of the points, and one before the first."""
    ends = [sample.stats if sample is not None else None for sample in samples]
    pairs = [_pair(before, after) for before, after in zip(ends, ends[1:], strict=False)]
    return {
        **_rates(pairs, step_s),
        **_gauges([after for _, after in pairs]),
        **_per_step(pairs),
    }


def front_series(samples: list[Sample | None], step_s: int) -> dict[str, Points]:
    def rate(get: Callable[[FrontCounts], int]) -> Points:
        return [
            (get(after.front) - get(before.front)) / step_s if before is not None and after is not None else None
            for before, after in zip(samples, samples[1:], strict=False)
        ]

    return {
        "http_requests_per_s": rate(lambda front: front.requests),
        "errors_per_s": rate(lambda front: front.errors),
        "client_errors_per_s": rate(lambda front: front.client_errors),
        "refused_per_s": rate(lambda front: front.refused),
        "event_loop_lag_ms": [1e3 * sample.front.loop_lag_s if sample is not None else None for sample in samples[1:]],
    }


def merge_front_series(parts: list[dict[str, Points]]) -> dict[str, Points]:
    """Rates of several fronts are summed; the lag is the worst."""
    merged: dict[str, Points] = {}
    for name in parts[0]:
        combine = max if name == "event_loop_lag_ms" else sum
        columns = zip(*(part.get(name, []) for part in parts), strict=False)
        known = ([value for value in column if value is not None] for column in columns)
        merged[name] = [float(combine(values)) if values else None for values in known]
    return merged


_Pair = tuple[EngineStats, EngineStats] | tuple[None, EngineStats | None]
"""The engine's report before and after a point; None before if there was none or the engine restarted."""


def _pair(before: EngineStats | None, after: EngineStats | None) -> _Pair:
    if before is None or after is None or before.step_no > after.step_no:
        return None, after
    return before, after


def _rates(pairs: list[_Pair], step_s: int) -> dict[str, Points]:
    def rate(get: Callable[[EngineStats], float]) -> Points:
        return [(get(after) - get(before)) / step_s if before is not None else None for before, after in pairs]  # type: ignore[arg-type]

    return {
        "requests_per_s": rate(lambda stats: sum(stats.finished.values())),
        "input_tokens_per_s": rate(lambda stats: stats.prompt_tokens),
        "cached_tokens_per_s": rate(lambda stats: stats.prefix_hit_tokens),
        "output_tokens_per_s": rate(lambda stats: stats.output_tokens),
        "steps_per_s": rate(lambda stats: stats.step_no),
        "preemptions_per_s": rate(lambda stats: stats.preemptions),
        "evictions_per_s": rate(lambda stats: stats.evictions),
        "bytes_per_s": rate(lambda stats: stats.bytes_read),
        "flops": rate(lambda stats: stats.flops),
    }


def _gauges(ends: list[EngineStats | None]) -> dict[str, Any]:
    def gauge(get: Callable[[EngineStats], float]) -> Points:
        return [get(stats) if stats is not None else None for stats in ends]

    def share(get: Callable[[EngineStats], int], total: Callable[[EngineStats], int]) -> Points:
        return gauge(lambda stats: get(stats) / total(stats) if total(stats) else 0.0)

    def by_class(get: Callable[[EngineStats], tuple[int, ...]]) -> dict[str, Points]:
        return {
            name: gauge(lambda stats, index=index: get(stats)[index])  # type: ignore[misc]
            for index, name in enumerate(CLASS_NAMES)
        }

    return {
        "running": gauge(lambda stats: stats.running),
        "waiting": gauge(lambda stats: stats.waiting),
        "running_by_class": by_class(lambda stats: stats.running_by_class),
        "waiting_by_class": by_class(lambda stats: stats.waiting_by_class),
        "kv_share": {
            "used": share(lambda s: s.blocks_total - s.blocks_free - s.blocks_cached, lambda s: s.blocks_total),
            "cached": share(lambda s: s.blocks_cached, lambda s: s.blocks_total),
            "free": share(lambda s: s.blocks_free, lambda s: s.blocks_total),
            "host_used": share(lambda s: s.host_blocks_used, lambda s: s.host_blocks_total),
            "disk_used": share(lambda s: s.disk_blocks_used, lambda s: s.disk_blocks_total),
        },
    }


def _per_step(pairs: list[_Pair]) -> dict[str, Any]:
    def ratio(get: Callable[[EngineStats], float], of: Callable[[EngineStats], float], scale: float = 1.0) -> Points:
        found: Points = []
        for before, after in pairs:
            amount = of(after) - of(before) if before is not None and after is not None else 0
            found.append(scale * (get(after) - get(before)) / amount if amount else None)  # type: ignore[arg-type]
        return found

    def steps(stats: EngineStats) -> float:
        return stats.step_no

    def computed(stats: EngineStats) -> float:
        return token_use(stats).computed

    def wasted(cause: str, stats: EngineStats) -> float:
        return token_use(stats).wasted[cause]

    return {
        "step_ms": {
            "plan": ratio(lambda stats: stats.plan_seconds, steps, 1e3),
            "launch": ratio(lambda stats: stats.launch_seconds, steps, 1e3),
            "device": ratio(lambda stats: stats.device_seconds, steps, 1e3),
            "apply": ratio(lambda stats: stats.apply_seconds, steps, 1e3),
        },
        "rows_per_step": ratio(lambda stats: stats.step_rows, steps),
        "prefill_tokens_per_step": ratio(lambda stats: stats.prefill_tokens, steps),
        "decode_tokens_per_step": ratio(lambda stats: stats.decode_tokens, steps),
        "padding_share": ratio(
            lambda stats: stats.padded_tokens,
            lambda stats: stats.padded_tokens + stats.prefill_tokens + stats.decode_tokens,
        ),
        "goodput_share": ratio(lambda stats: token_use(stats).useful, computed),
        "wasted_share": {cause: ratio(partial(wasted, cause), computed) for cause in CAUSES},
        "prefix_hit_rate": ratio(lambda stats: stats.prefix_hit_tokens, lambda stats: stats.prefix_query_tokens),
        "draft_acceptance": ratio(lambda stats: stats.accepted_tokens, lambda stats: stats.drafted_tokens),
    }
