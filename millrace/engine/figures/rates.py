"""Rates measured while serving: admissions, arrivals, tokens. Admission control forecasts waiting times from them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

WINDOW_S = 10.0
"""Rates are averages over this window."""
DECAY = 0.05
"""Weight of a new value in moving averages. The first values are averaged evenly: the first step is often a slow one
(cold caches, a graph being captured) and must not count for long."""
FULL_STEP_TOKENS = 256
"""Smaller steps say little about the throughput of full ones."""
BURST_S = 2.0
"""Shorter window for arrivals, so that a burst counts soon after it begins."""
Sample = tuple[float, int, tuple[int, ...]]
"""Time, number admitted so far, and number arrived so far by class."""


class MovingMean:
    """Even over the first values, then with weight `DECAY` for each new one."""

    def __init__(self) -> None:
        self.value = 0.0
        self._weight = 1.0

    def add(self, value: float) -> None:
        self.add_many((value,))

    def add_many(self, values: Sequence[float]) -> None:
        mean, weight = self.value, self._weight
        for value in values:
            mean += weight * (value - mean)
            if weight > DECAY:
                weight = max(DECAY, weight / (1 + weight))
        self.value, self._weight = mean, weight


class MeasuredRates:
    def __init__(self) -> None:
        self._samples: deque[Sample] = deque()
        self._num_arrived = [0, 0, 0]
        self._num_admitted = 0
        self._row_s = MovingMean()
        self._step_s = MovingMean()
        self._full_step_rate = MovingMean()

    def on_step(self, num_tokens: int, step_s: float) -> None:
        self.on_steps(num_tokens, (step_s,))

    def on_steps(self, num_tokens: int, step_s: Sequence[float]) -> None:
        """Steps of this many tokens each."""
        self._step_s.add_many(step_s)
        if num_tokens >= FULL_STEP_TOKENS:
            self._full_step_rate.add_many([num_tokens / one for one in step_s if one > 0])

    @property
    def step_s(self) -> float:
        """Average time of a step."""
        return self._step_s.value

    @property
    def tokens_per_s(self) -> float:
        """Throughput of full steps; 0 until there was one."""
        return self._full_step_rate.value

    def on_admitted(self, count: int) -> None:
        self._num_admitted += count

    def on_arrival(self, priority: int) -> None:
        self._num_arrived[priority] += 1

    def on_ended(self, row_s: float) -> None:
        """A request ended that held a row for `row_s` seconds."""
        self._row_s.add(row_s)

    def sample(self, now: float) -> None:
        """Called a few times per second. Rates are differences between samples in the window."""
        self._samples.append((now, self._num_admitted, tuple(self._num_arrived)))
        while len(self._samples) > 2 and now - self._samples[0][0] > WINDOW_S:
            self._samples.popleft()

    def admissions_per_s(self, num_rows: int) -> float:
        """The measured rate, or the rate at which `num_rows` rows become free, whichever is higher: while no request
        waits, the measured rate only shows how many arrived."""
        possible = num_rows / self._row_s.value if self._row_s.value else 0.0
        if len(self._samples) < 2 or self._samples[-1][0] <= self._samples[0][0]:
            return possible
        (began, before, _), (now, admitted, _) = self._samples[0], self._samples[-1]
        return max(possible, (admitted - before) / (now - began))

    def arrivals_per_s(self) -> tuple[float, ...]:
        """By class: the higher of the rates over the window and over the last `BURST_S`. A burst counts at once,
        because a request that arrives in it competes with the rest of it."""
        if len(self._samples) < 2:
            return (0.0, 0.0, 0.0)
        newest = self._samples[-1]
        recent = next((sample for sample in reversed(self._samples) if newest[0] - sample[0] >= BURST_S), None)
        return tuple(map(max, _rates(self._samples[0], newest), _rates(recent or self._samples[0], newest)))


def _rates(before: Sample, after: Sample) -> tuple[float, ...]:
    elapsed_s = after[0] - before[0]
    if elapsed_s <= 0:
        return (0.0, 0.0, 0.0)
    return tuple((now - then) / elapsed_s for now, then in zip(after[2], before[2], strict=True))
