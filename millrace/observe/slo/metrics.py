"""Objectives as metrics: counters of good and all values, from which alert rules compute burn rates."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from millrace.observe.slo.tracker import WINDOWS_S, SloTracker


def slo_metrics(tracker: SloTracker) -> Iterator[Metric]:
    if not tracker.objectives:
        return
    good = CounterMetricFamily("millrace_slo_good_events", "Values within the limit.", labels=["slo"])
    total = CounterMetricFamily("millrace_slo_events", "All values that an objective is about.", labels=["slo"])
    wanted = GaugeMetricFamily("millrace_slo_objective_ratio", "Share that must be within.", labels=["slo"])
    left = GaugeMetricFamily("millrace_slo_budget_left_ratio", "Error budget left of 30 days.", labels=["slo"])
    burn = GaugeMetricFamily("millrace_slo_burn_rate", "1 = uses the budget exactly.", labels=["slo", "window"])
    for index, report in enumerate(tracker.report(time.time())):
        if tracker.objectives[index].is_about_errors:
            continue  # Each front knows its own: `millrace_failed_requests_total` and the like are summed.
        name = report["name"]
        good.add_metric([name], tracker.good[index])
        total.add_metric([name], tracker.total[index])
        wanted.add_metric([name], report["objective"])
        left.add_metric([name], report["budget_left"])
        for window in WINDOWS_S:
            burn.add_metric([name, window], report["burn"][window])
    yield from (good, total, wanted, left, burn)
