"""The ratio of two things measured in turns, and how sure it is."""

from __future__ import annotations

import math
from collections.abc import Sequence

from millrace.bench.http.observing import T_95, Ratio

TRIMMED = 0.2
"""Share of the rounds left out at either end: one disturbed round must not decide."""
MIN_TRIMMED = 8
"""Rounds from which on some are left out."""


def paired_ratio(on: Sequence[float], off: Sequence[float]) -> Ratio:
    """The trimmed mean of the rounds' ratios (their logarithms), with the 95% interval that belongs to it: Student's t
    with the variance of the winsorised rounds."""
    logs = sorted(math.log(ours / theirs) for ours, theirs in zip(on, off, strict=True))
    num_cut = int(TRIMMED * len(logs)) if len(logs) >= MIN_TRIMMED else 0
    kept = logs[num_cut : len(logs) - num_cut]
    mean, degrees = sum(kept) / len(kept), len(kept) - 1
    if not degrees:
        return Ratio(math.exp(mean), 0.0, math.inf)
    winsorised = [kept[0]] * num_cut + kept + [kept[-1]] * num_cut
    centre = sum(winsorised) / len(winsorised)
    variance = sum((one - centre) ** 2 for one in winsorised) / (len(winsorised) - 1)
    share = len(kept) / len(logs)
    half = T_95[min(degrees, len(T_95)) - 1] * math.sqrt(variance / len(logs)) / share
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def half_width(ratio: Ratio) -> float:
    """Of the interval, as a share of the ratio."""
    return math.sqrt(ratio.high / ratio.low) - 1 if ratio.low > 0 else math.inf
