"""Predicts output lengths online: a moving average per kind of request.

A kind is the tenant, the prompt length and `max_tokens`, both lengths in powers of two. With few observations, the
prediction leans on the tenant's average, and that on the average of all requests.
"""

from __future__ import annotations

from collections import OrderedDict

from millrace.plan.request import Request

Kind = tuple[object, ...]

INITIAL_GUESS = 256.0
PRIOR_WEIGHT = 8.0
"""Number of observations that the more general average counts as."""
DECAY = 0.05
MAX_KINDS = 4096


class OutputLengthPredictor:
    def __init__(self) -> None:
        self._means: OrderedDict[Kind, tuple[float, int]] = OrderedDict()

    def predict(self, request: Request) -> float:
        """Expected output tokens, at most `max_tokens`."""
        expected = INITIAL_GUESS
        for kind in _kinds(request):
            mean, count = self._means.get(kind, (0.0, 0))
            expected = (mean * count + expected * PRIOR_WEIGHT) / (count + PRIOR_WEIGHT)
        return min(expected, float(request.max_tokens))

    def observe(self, request: Request) -> None:
        for kind in _kinds(request):
            mean, count = self._means.get(kind, (0.0, 0))
            mean += max(DECAY, 1.0 / (count + 1)) * (request.num_output - mean)
            self._means[kind] = (mean, min(count + 1, round(1 / DECAY)))
            self._means.move_to_end(kind)
        while len(self._means) > MAX_KINDS:
            self._means.popitem(last=False)


def _kinds(request: Request) -> tuple[Kind, ...]:
    """From the most general to the most specific."""
    return (
        (),
        (request.tenant,),
        (request.tenant, request.num_prompt.bit_length(), request.max_tokens.bit_length()),
    )
