"""Intended send times of an open loop, in seconds from its start."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

ArrivalKind = Literal["poisson", "gamma", "constant"]


def arrival_times(
    kind: ArrivalKind, rate: float, duration_s: float, rng: np.random.Generator, burstiness: float = 1.0
) -> npt.NDArray[np.float64]:
    """`burstiness` (gamma only): coefficient of variation of the gaps; 1 is Poisson, more is bursty."""
    if kind == "constant":
        return np.arange(max(1, int(rate * duration_s))) / rate
    expected = rate * duration_s
    count = int(expected + 6 * max(1.0, burstiness) * np.sqrt(expected) + 10)
    shape = 1.0 / burstiness**2 if kind == "gamma" else 1.0
    times = np.zeros(0)
    while not len(times) or times[-1] < duration_s:
        last = times[-1] if len(times) else 0.0
        times = np.append(times, last + rng.gamma(shape, 1.0 / (rate * shape), count).cumsum())
    return times[times < duration_s]
