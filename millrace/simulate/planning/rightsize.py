"""The load of a running server as a workload: rate, lengths and shared prefixes, from two readings of its metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping

from millrace.errors import ConfigError
from millrace.load.lengths import Lengths
from millrace.simulate.requests import Generated

SIGMA = 0.8
"""Assumed spread of lengths, log-normal: the metrics have their means only."""


def workload_of_server(
    before: Mapping[str, float], after: Mapping[str, float], seconds: float, *, simulated_s: float, seed: int = 0
) -> Generated:
    """What ended between two readings of `/metrics`, `seconds` apart, drawn again for `simulated_s`. Prompts share one
    prefix as long as the mean of what was found in the cache."""

    def change(name: str) -> float:
        """Of a counter, over all its labels."""
        return sum(value - before.get(series, 0.0) for series, value in after.items() if series.split("{")[0] == name)

    count = change("millrace_sequences_total")
    if count < 1:
        raise ConfigError(f"No request ended in the {seconds:g} s between two readings of the server's metrics.")
    prompt, output, cached = (
        change(f"millrace_request_{name}_tokens_total") / count for name in ("prompt", "output", "cached")
    )
    prefix = min(int(cached), max(0, int(prompt) - 1))
    return Generated(
        rate=count / seconds,
        seconds=simulated_s,
        prompt=_around(prompt - prefix),
        output=_around(output),
        prefix_tokens=prefix,
        seed=seed,
    )


def _around(mean: float) -> Lengths:
    """Lengths with this mean."""
    return Lengths("lognormal", max(1.0, mean * math.exp(-SIGMA * SIGMA / 2)), SIGMA)
