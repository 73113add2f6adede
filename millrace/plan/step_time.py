"""A model of step time, fitted while serving: how long a step takes, from what it computes.

The time is a sum of five parts: the step itself, its prompt tokens, its decode rows, the context that these read, and
for prompts the pairs of a token and a token it attends to. Each part has a rate. The rates are known roughly from the
start and then follow the measured steps, as a Kalman filter whose rates drift: a rate that the recent steps say nothing
about keeps its value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from millrace.plan.step import StepPlan

Floats = npt.NDArray[np.float64]

NOISE = 0.15
"""Standard deviation of a measured time, as a share of the predicted one."""
NOISE_S = 2e-5
"""The same for steps that take next to no time."""
DRIFT = 0.03
"""Change of a rate from one observed step to the next, as a share of its first value."""
OUTLIER = 3.0
"""Standard deviations from the prediction beyond which a step counts as disturbed, for example by other processes."""
NUM_OUTLIERS = 6
"""So many outliers in a row, all to the same side, are no disturbance: the device has become faster or slower."""
OBSERVE_EVERY = 8
"""Of repeated decode steps, one in so many is observed: they all tell the same."""


@dataclass(frozen=True, slots=True)
class StepRates:
    """Seconds per unit of each part. None may be zero: the fit scales them."""

    step_s: float
    prompt_token_s: float
    decode_row_s: float
    """Also for each place of a draft."""
    context_token_s: float
    """Per token of context that a decode row reads."""
    pair_s: float
    """Per pair of a prompt token and a token before it."""


class StepTimeModel:
    def __init__(self, rates: StepRates, uncertainty: float = 1.0) -> None:
        """`uncertainty`: standard deviation of the first rates, as a share of their values."""
        self._scale = np.array(
            [rates.step_s, rates.prompt_token_s, rates.decode_row_s, rates.context_token_s, rates.pair_s]
        )
        self._factors = np.ones(5)
        """The rates, divided by the first ones."""
        self._widest = uncertainty**2
        self._covariance = np.eye(5) * self._widest
        self._diagonal = self._covariance.reshape(-1)[::6]  # A view.
        self._outliers: list[float] = []
        """Measured over predicted time of the outliers in a row, all to the same side."""
        self._num_repeated = 0
        self._publish()

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """A step took this long."""
        if plan.is_repeated_decode:
            self._num_repeated += 1
            if self._num_repeated % OBSERVE_EVERY:
                return
        if seconds > 0:
            self._fit(_parts(plan) * self._scale, seconds)

    def decode_s(self, num_rows: int, context: int) -> float:
        """Predicted time of a step with these decode rows, whose contexts have this many tokens together."""
        return self.step_s + self.decode_row_s * num_rows + self.context_token_s * context

    def prompt_tokens(self, seconds: float, context: int) -> int:
        """The most tokens of a prompt that a step computes in this time beyond its other parts. `context`: tokens of
        the prompt that are computed already."""
        if seconds <= 0:
            return 0
        # linear * n + pair_s * n² / 2 = seconds
        linear = self.prompt_token_s + self.pair_s * context
        tokens = 2 * seconds / (linear + math.sqrt(linear * linear + 2 * self.pair_s * seconds) or math.inf)
        return int(min(tokens, 1e9))

    def _fit(self, parts_s: Floats, seconds: float) -> None:
        """`parts_s`: time of each part at the first rates."""
        predicted = float(parts_s @ self._factors)
        spread = self._covariance @ parts_s
        variance = float(parts_s @ spread) + (NOISE * predicted) ** 2 + NOISE_S**2
        surprise = seconds - predicted
        if abs(surprise) > OUTLIER * math.sqrt(variance):
            self._on_outlier(seconds / max(predicted, NOISE_S))
            return
        self._outliers.clear()
        gain = spread / variance
        self._factors = np.maximum(self._factors + gain * surprise, 0.0)
        self._covariance -= np.outer(gain, spread)
        self._diagonal += DRIFT**2
        if self._diagonal.max() > self._widest:
            shrink = np.minimum(1.0, np.sqrt(self._widest / self._diagonal))
            self._covariance *= np.outer(shrink, shrink)
        self._publish()

    def _on_outlier(self, ratio: float) -> None:
        """Ignore a disturbed step. After several in a row change all rates by the least of their ratios, and trust the
        next steps as much as the very first."""
        if self._outliers and (self._outliers[0] > 1) != (ratio > 1):
            self._outliers.clear()
        self._outliers.append(ratio)
        if len(self._outliers) == NUM_OUTLIERS:
            self._scale *= min(self._outliers, key=lambda ratio: abs(math.log(ratio)))
            self._covariance[:] = np.eye(5) * self._widest
            self._outliers.clear()
            self._publish()

    def _publish(self) -> None:
        rates: list[float] = (self._factors * self._scale).tolist()
        self.step_s, self.prompt_token_s, self.decode_row_s, self.context_token_s, self.pair_s = rates


def _parts(plan: StepPlan) -> Floats:
    """Size of each part of a step: 1, prompt tokens, decode rows, tokens that they read, pairs of prompt tokens."""
    num_rows = len(plan.rows)
    if plan.is_repeated_decode:
        return np.array([1.0, 0.0, num_rows, num_rows + float(plan.starts.sum()), 0.0])
    starts, counts = plan.starts.astype(np.float64), plan.counts
    is_prompt = counts > 1
    num_prompt = float(counts[is_prompt].sum())
    pairs = float((counts * (starts + counts / 2))[is_prompt].sum())
    num_decode = num_rows - int(is_prompt.sum())
    context = num_decode + float(starts[~is_prompt].sum())
    drafts = float(plan.draft_places.sum()) if plan.draft_places is not None else 0.0
    return np.array([1.0, num_prompt, num_decode + drafts, context, pairs])
