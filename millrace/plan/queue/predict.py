"""How long an answer will be, learnt while serving: a decaying mean per kind of request.

A kind is the tenant, the size of the prompt and the size of `max_tokens`, each in powers of two. A kind that has been
seen little leans on its tenant's mean, and that on everybody's.
"""

from __future__ import annotations

from collections import OrderedDict

from millrace.plan.request import Request

Kind = tuple[object, ...]

FIRST_GUESS = 256.0
ENOUGH = 8.0
"""Observations from which on a kind counts as much as the mean above it."""
DECAY = 0.05
MOST_KINDS = 4096


class OutputLengthPredictor:
    def __init__(self) -> None:
        self._means: OrderedDict[Kind, tuple[float, int]] = OrderedDict()

    def predict(self, request: Request) -> float:
        """Expected tokens of output, never above what the request allows."""
        expected = FIRST_GUESS
        for kind in _kinds(request):
            mean, count = self._means.get(kind, (0.0, 0))
            expected = (mean * count + expected * ENOUGH) / (count + ENOUGH)
        return min(expected, float(request.max_tokens))

    def observe(self, request: Request) -> None:
        for kind in _kinds(request):
            mean, count = self._means.get(kind, (0.0, 0))
            mean += max(DECAY, 1.0 / (count + 1)) * (request.num_output - mean)
            self._means[kind] = (mean, min(count + 1, round(1 / DECAY)))
            self._means.move_to_end(kind)
        while len(self._means) > MOST_KINDS:
            self._means.popitem(last=False)


def _kinds(request: Request) -> tuple[Kind, ...]:
    """From the most general to the most particular."""
    return (
        (),
        (request.tenant,),
        (request.tenant, request.num_prompt.bit_length(), request.max_tokens.bit_length()),
    )
