"""How much KV memory the running set will come to need, from what each request may still generate.

Sorted by what remains, longest first, the requests end in reverse order. When the i-th ends, the i+1 longest are
still there and each has grown by the i-th's remainder, so the future peak is the largest of
    sum(held[:i+1]) + (i + 1) * remaining[i]
over i: exact if the remainders are.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def kv_peak(held: Floats, remaining: Floats) -> float:
    """Largest future number of tokens held, given tokens held now and tokens still to come, per request."""
    if len(held) == 0:
        return 0.0
    longest_first = np.argsort(-remaining, kind="stable")
    held, remaining = held[longest_first], remaining[longest_first]
    return float(np.max(np.cumsum(held) + np.arange(1, len(held) + 1) * remaining))


class OutputLengthEstimate:
    """A decaying estimate of how many tokens requests really generate; `max_tokens` is usually far above it."""

    def __init__(self, guess: float = 512.0, decay: float = 0.05) -> None:
        self._mean = guess
        self._decay = decay

    def observe(self, num_output: int) -> None:
        self._mean += self._decay * (num_output - self._mean)

    def remaining(self, generated: Floats, at_most: Floats) -> Floats:
        """Expected tokens still to come, with a quarter of the mean as margin for those past it."""
        expected = np.maximum(1.25 * self._mean - generated, 0.25 * self._mean)
        return np.minimum(expected, at_most)

    def remaining_of_one(self, generated: int, at_most: int) -> float:
        return min(max(1.25 * self._mean - generated, 0.25 * self._mean), at_most)
