"""`--no-figures`: the engine answers the same and counts nothing that a report does not need."""

from __future__ import annotations

import inspect

from millrace.engine.figures.uncounted import UncountedTimes
from millrace.observe.histograms import TTFT, Histograms


def test_every_observation_is_left_out() -> None:
    """A new way to observe must be switched off too. (`observe_gaps` is called for counted steps only.)"""
    observing = {name for name, _ in inspect.getmembers(Histograms, inspect.isfunction) if name.startswith("observe")}
    assert observing - set(vars(UncountedTimes)) == {"observe_gaps"}
    times = UncountedTimes()
    times.observe(TTFT, 1, 0.5)
    assert not times.values.any()
