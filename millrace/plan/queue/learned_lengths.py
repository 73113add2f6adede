"""Output lengths by a small regressor beside the averages, fitted online.

Features: lengths of prompt and limit, the class, what the tenant's last requests generated, and what requests with the
same first or last prompt tokens did, which tells applications apart. Every request is predicted before it is learned
from, so the errors that are compared are those on requests not seen yet. The regressor counts only while it wins.
"""

from __future__ import annotations

import math
from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from millrace.plan.queue.predict import INITIAL_GUESS, OutputLengthPredictor
from millrace.plan.request import Request

Floats = npt.NDArray[np.float64]

NUM_FEATURES = 9
FIRST_TOKENS, LAST_TOKENS = 48, 6
"""Prompt tokens by which requests count as related: a system prompt, and the end of a template."""
MAX_KEYS = 4096
RIDGE, FORGETTING = 0.1, 0.999
MAX_UNCERTAINTY = NUM_FEATURES / RIDGE
"""That of the start. Requests that are all alike say nothing about most weights, and forgetting makes these ever more
uncertain."""
MAX_DISTANCE = 3.5
"""Of the log of a prediction from the mean log."""
GAIN = 0.1
"""Weight of a new value in the averages of a key."""
MIN_SEEN = 100
"""Requests after which the regressor may count."""
NUM_FIRST = 50
"""The first requests' errors are forgotten: both know nothing yet."""
MIN_WIN = 0.03
"""It counts while its mean error is smaller by this share."""
ERROR_DECAY = 0.005
WINDOW_S, MAX_PER_WINDOW = 0.1, 2
"""About so many requests are learned from in that time: servers of short requests end thousands a second."""


class LengthRegressor:
    """Recursive least squares of log lengths."""

    def __init__(self) -> None:
        self._weights: Floats = np.zeros(NUM_FEATURES)
        self._inverse: Floats = np.eye(NUM_FEATURES) / RIDGE
        self._seen: OrderedDict[object, float] = OrderedDict()
        """Average log length by key: a tenant, first tokens, last tokens."""
        self._mean = math.log(INITIAL_GUESS)
        self._scale = 1.0
        """Mean length over mean prediction: the mean of a log is below the log of the mean."""

    def predict(self, request: Request) -> float:
        return min(self._raw(self._features(request)) * self._scale, float(request.max_tokens))

    def learn(self, request: Request) -> float:
        """Learn from a request that has ended. Returns what `predict` expected of it before."""
        features, known = self._features(request), math.log(max(1, request.num_output))
        raw = self._raw(features)
        expected = min(raw * self._scale, float(request.max_tokens))
        self._scale += ERROR_DECAY * (max(1, request.num_output) / raw - self._scale)
        self._scale = min(max(self._scale, 0.2), 5.0)
        spread = self._inverse @ features
        gain = spread / (FORGETTING + float(features @ spread))
        self._weights += gain * (known - float(features @ self._weights))
        self._inverse = self._inverse - np.outer(gain, spread)
        if self._inverse.trace() < MAX_UNCERTAINTY:
            self._inverse /= FORGETTING
        self._mean += GAIN / 4 * (known - self._mean)
        for key in _keys(request):
            before = self._seen.get(key, self._mean)
            self._seen[key] = before + GAIN * (known - before)
            self._seen.move_to_end(key)
        while len(self._seen) > MAX_KEYS:
            self._seen.popitem(last=False)
        return expected

    def _raw(self, features: Floats) -> float:
        found = float(features @ self._weights)
        return math.exp(min(max(found, 0.0, self._mean - MAX_DISTANCE), self._mean + MAX_DISTANCE))

    def _features(self, request: Request) -> Floats:
        prompt, limit = math.log(max(1, request.num_prompt)), math.log(max(1, request.max_tokens))
        seen = (self._seen.get(key, self._mean) for key in _keys(request))
        return np.array([1.0, prompt, prompt * prompt / 10, limit, request.priority, self._mean, *seen])


def _keys(request: Request) -> tuple[object, object, object]:
    prompt = request.prompt
    return (
        ("tenant", request.tenant),
        ("first", request.tenant, prompt[:FIRST_TOKENS].tobytes()),
        ("last", request.tenant, prompt[-LAST_TOKENS:].tobytes()),
    )


class Sample:
    """One of every few requests: of all while few end, and of fewer the more end."""

    def __init__(self) -> None:
        self._one_of, self._began = 1, -math.inf
        self._num_seen = self._num_taken = 0
        """In this window."""

    def takes(self, now: float) -> bool:
        """True if the request that ended now is part of it."""
        if now - self._began >= WINDOW_S:
            self._one_of = max(1, self._num_seen // MAX_PER_WINDOW)
            self._began, self._num_seen, self._num_taken = now, 0, 0
        self._num_seen += 1
        if self._num_seen % self._one_of:
            return False
        self._num_taken += 1
        if self._num_taken % MAX_PER_WINDOW == 0:  # A burst: many end at once.
            self._one_of *= 2
        return True


class LearnedLengths:
    """The averages, or the regressor while it wins. Both learn from a sample of the requests."""

    def __init__(self) -> None:
        self._sample = Sample()
        self.averages, self.regressor = OutputLengthPredictor(), LengthRegressor()
        self.num_seen = 0
        self.errors = [0.0, 0.0]
        """Mean absolute error in tokens on requests not seen before: of the averages, and of the regressor."""

    @property
    def wins(self) -> bool:
        averages, regressor = self.errors
        return self.num_seen >= MIN_SEEN and regressor < (1 - MIN_WIN) * averages

    def predict(self, request: Request) -> float:
        """Expected output tokens, at most `max_tokens`."""
        return (self.regressor if self.wins else self.averages).predict(request)

    def expected(self, request: Request) -> float:
        """The regressor's prediction; NaN while it does not win."""
        return self.regressor.predict(request) if self.wins else math.nan

    def observe(self, request: Request, now: float) -> None:
        """A request ended."""
        if not self._sample.takes(now):
            return
        self.num_seen += 1
        weight = max(ERROR_DECAY, 1 / max(1, self.num_seen - NUM_FIRST))
        for at, expected in enumerate((self.averages.predict(request), self.regressor.learn(request))):
            self.errors[at] += weight * (abs(expected - request.num_output) - self.errors[at])
        self.averages.observe(request)
