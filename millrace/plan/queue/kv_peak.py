"""The future peak of KV memory, from the number of tokens that each request still generates.

Sort the requests by remaining tokens, longest first; they end in reverse order. When request i ends, requests 0 to i
are still running and each has grown by remaining[i]. The peak is therefore the maximum over i of
    sum(held[: i + 1]) + (i + 1) * remaining[i]
which is exact if the remaining tokens are.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from millrace.plan.queue.learned_lengths import LearnedLengths
from millrace.plan.request import Request

Floats = npt.NDArray[np.float64]


def kv_peak(held: Floats, remaining: Floats, num_growing: int = 1) -> float:
    """Maximum number of block tokens held at any future time, given block tokens held and tokens remaining per request.
    `num_growing`: KV groups that grow with every token."""
    if len(held) == 0:
        return 0.0
    longest_first = np.argsort(-remaining, kind="stable")
    held, remaining = held[longest_first], remaining[longest_first]
    return float(np.max(np.cumsum(held) + num_growing * np.arange(1, len(held) + 1) * remaining))


class OutputLengthEstimate:
    """Exponential moving average of output lengths, or what a regressor expects of a request while that is better.
    `max_tokens` is usually far above either."""

    def __init__(self, initial: float = 512.0, decay: float = 0.05) -> None:
        self._mean = initial
        self._decay = decay
        self._learned = LearnedLengths()

    def observe(self, request: Request, now: float) -> None:
        self._mean += self._decay * (request.num_output - self._mean)
        self._learned.observe(request, now)

    def expected(self, request: Request) -> float:
        """What is expected of this request alone; NaN: no more than of any other."""
        return self._learned.expected(request)

    def remaining(self, generated: Floats, limit: Floats, expected: Floats) -> Floats:
        """Expected remaining tokens: 1.25 times the mean in total, but at least a quarter of the mean more. `expected`:
        see there; it counts instead of the mean."""
        means = np.where(np.isnan(expected), self._mean, expected)
        return np.minimum(np.maximum(1.25 * means - generated, 0.25 * means), limit)

    def remaining_of_one(self, generated: int, limit: int, expected: float) -> float:
        mean = self._mean if math.isnan(expected) else expected
        return min(max(1.25 * mean - generated, 0.25 * mean), limit)
