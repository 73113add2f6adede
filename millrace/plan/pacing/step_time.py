"""A model of step time, fitted while serving: how long a step takes, from what it computes.

The time is a sum of five parts: the step itself, its prompt tokens, its decode rows, the context that these read, and
for prompts the pairs of a token and a token it attends to. Each part has a rate. The rates are known roughly from the
start and then follow the measured steps, as a Kalman filter whose rates drift: a rate that the recent steps say nothing
about keeps its value. Beside the rates, which change slowly, there is the pace of the last few steps: on a machine with
other work all parts take longer for some seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from millrace.plan.step import NO_EPOCH, StepPlan

Floats = npt.NDArray[np.float64]

CONTEXT = 3
"""Index of the context of decode rows in `step_parts`."""
NOISE = 0.15
"""Standard deviation of a measured time, as a share of the predicted one."""
NOISE_S = 2e-5
"""The same for steps that take next to no time."""
DRIFT = 0.03
"""Change of a rate from one observed step to the next, as a share of its value."""
SMALLEST = 0.1
"""A rate counts as at least this share of its first value where its uncertainty is concerned."""
OUTLIER = 3.0
"""Standard deviations from the prediction beyond which a step counts as disturbed, for example by other processes."""
NUM_OUTLIERS, NUM_FIRST_OUTLIERS = 6, 3
"""So many outliers in a row, all to the same side, are no disturbance: the device has become faster or slower. The
second number holds for the first steps, when the rates are mere guesses."""
NUM_FIRST = 32
"""Steps that count as first."""
PACE_GAIN, MAX_PACE = 0.5, 2.0
"""Weight of the last step in the pace, and the most that it may be."""
OBSERVE_EVERY = 8
"""After the first steps, one in so many repeated decode steps is observed: they all tell the same."""
OBSERVE_S = 0.05
"""After the first steps, steps are observed so far apart: on a fast device the fit would take a share of each. Steps of
the same kind, with or without prompt tokens, are twice as far apart, so both kinds are observed if they alternate."""


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

    def column(self) -> Floats:
        """In the order of `step_parts`."""
        return np.array([self.step_s, self.prompt_token_s, self.decode_row_s, self.context_token_s, self.pair_s])


class StepTimeModel:
    def __init__(self, rates: StepRates, uncertainty: float = 1.0) -> None:
        """`uncertainty`: standard deviation of the first rates, as a share of their values."""
        self._scale = rates.column()
        self._factors = np.ones(5)
        """The rates, divided by the first ones."""
        self._widest = uncertainty**2
        self._covariance = np.eye(5) * self._widest
        self._diagonal = self._covariance.reshape(-1)[::6]  # A view.
        self._num_outliers = 0
        """Outliers in a row; negative if they were faster than predicted."""
        self._num_seen = 0
        self._epoch = NO_EPOCH
        """Of the plan observed last."""
        self._unobserved_s = 0.0
        """Time of the steps since the last one that was observed."""
        self._was_mixed = False
        """True if that one had prompt tokens."""
        self.most_prompt_tokens = 0
        """In one observed step."""
        self.pace = 1.0
        """How many times longer than predicted the last steps took, disturbed ones included; at least 1."""
        self._publish()

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """A step took this long."""
        if self._is_telling(plan, _is_mixed(plan), seconds):
            self._observe_parts(step_parts(plan), seconds)

    def observe_repeated(self, last: StepPlan, seconds: Sequence[float]) -> None:
        """The same for steps that decoded the same rows one after the other; `last` is the last one."""
        parts, num_after, num_rows = step_parts(last), len(seconds), len(last.rows)
        last_context, until = parts[CONTEXT], self._until_due(is_mixed=False)
        for one in seconds:
            num_after -= 1
            if self._num_seen >= NUM_FIRST and last.epoch == self._epoch and self._unobserved_s + one < until:
                self._num_seen += 1  # As `_is_telling` does, in a fraction of its time.
                self._unobserved_s += one
            elif self._is_telling(last, False, one):
                parts[CONTEXT], until = last_context - num_rows * num_after, self._until_due(is_mixed=False)
                self._observe_parts(parts, one)

    def _is_telling(self, plan: StepPlan, is_mixed: bool, seconds: float) -> bool:
        """True if the rates are fitted to this step too. Counts it."""
        self._num_seen += 1
        repeats, self._epoch = plan.repeats(self._epoch), plan.epoch
        self._unobserved_s += seconds
        if self._num_seen > NUM_FIRST:
            is_due = self._unobserved_s >= self._until_due(is_mixed=is_mixed)
            if not is_due or (repeats and self._num_seen % OBSERVE_EVERY):
                return False
        self._unobserved_s, self._was_mixed = 0.0, is_mixed
        return seconds > 0

    def _until_due(self, *, is_mixed: bool) -> float:
        """Time of unobserved steps after which one of this kind is observed."""
        return OBSERVE_S * (1 if is_mixed != self._was_mixed else 2)

    def _observe_parts(self, parts: Floats, seconds: float) -> None:
        self.most_prompt_tokens = max(self.most_prompt_tokens, int(parts[1]))
        self._fit(parts * self._scale, seconds)

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
        ratio = seconds / max(predicted, NOISE_S)
        self.pace = min(max(self.pace + PACE_GAIN * (ratio - self.pace), 1.0), MAX_PACE)
        spread = self._covariance @ parts_s
        variance = float(parts_s @ spread) + (NOISE * predicted) ** 2 + NOISE_S**2
        surprise = seconds - predicted
        if abs(surprise) > OUTLIER * math.sqrt(variance):
            if not self._is_new_speed(is_slower=surprise > 0):
                return
            sizes = np.maximum(self._factors, SMALLEST) * max(ratio, 1.0)
            self._covariance[:] = np.diag(self._widest * sizes**2)
            spread = self._covariance @ parts_s
            variance = float(parts_s @ spread) + (NOISE * seconds) ** 2
        self._num_outliers = 0
        gain = spread / variance
        self._factors = np.maximum(self._factors + gain * surprise, 0.0)
        self._covariance -= gain[:, None] * spread
        sizes = np.maximum(self._factors, SMALLEST)
        self._diagonal += (DRIFT * sizes) ** 2
        excess = self._diagonal / (self._widest * sizes * sizes)
        if excess.max() > 1:
            shrink = 1 / np.sqrt(np.maximum(excess, 1.0))
            self._covariance *= shrink[:, None] * shrink
        self._publish()

    def _is_new_speed(self, *, is_slower: bool) -> bool:
        """False for a disturbed step, which is ignored; True if several in a row say the same."""
        side = 1 if is_slower else -1
        self._num_outliers = side + (self._num_outliers if self._num_outliers * side > 0 else 0)
        return abs(self._num_outliers) >= (NUM_FIRST_OUTLIERS if self._num_seen <= NUM_FIRST else NUM_OUTLIERS)

    def _publish(self) -> None:
        rates: list[float] = (self._factors * self._scale).tolist()
        self.step_s, self.prompt_token_s, self.decode_row_s, self.context_token_s, self.pair_s = rates


def _is_mixed(plan: StepPlan) -> bool:
    return bool(plan.counts.max() > 1)


def step_parts(plan: StepPlan) -> Floats:
    """Size of each part of a step: 1, prompt tokens, decode rows, tokens that they read, pairs of prompt tokens."""
    num_rows = len(plan.rows)
    starts, counts = plan.starts.astype(np.float64), plan.counts
    is_prompt = (counts > 1) | ~plan.samples
    if plan.draft_places is None and not is_prompt.any():
        return np.array([1.0, 0.0, num_rows, num_rows + float(starts.sum()), 0.0])
    num_prompt = float(counts[is_prompt].sum())
    pairs = float((counts * (starts + counts / 2))[is_prompt].sum())
    num_decode = num_rows - int(is_prompt.sum())
    context = num_decode + float(starts[~is_prompt].sum())
    drafts = float(plan.draft_places.sum()) if plan.draft_places is not None else 0.0
    return np.array([1.0, num_prompt, num_decode + drafts, context, pairs])
