"""Splits measured device time among what steps did: a fixed part per step, prompt tokens, output tokens.

Least squares without negative parts over samples of a second each; intervals come from resampling the samples.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from millrace.observe.history import Sample

Floats = npt.NDArray[np.float64]
MIN_SAMPLES = 5
ROUNDS = 60
PARTS = ("step_s", "prefill_token_s", "decode_token_s")


@dataclass(frozen=True, slots=True)
class FittedCosts:
    """Device seconds; each with a 95% interval."""

    step_s: float
    prefill_token_s: float
    decode_token_s: float
    intervals: dict[str, tuple[float, float]]
    num_samples: int


def changes(samples: list[Sample]) -> Floats:
    """One row per second with work: device seconds, steps, prompt tokens computed, tokens decoded."""
    rows = []
    for before, after in zip(samples, samples[1:], strict=False):
        if before.stats is None or after.stats is None or after.stats.step_no <= before.stats.step_no:
            continue
        rows.append(
            (
                after.stats.device_seconds - before.stats.device_seconds,
                after.stats.step_no - before.stats.step_no,
                after.stats.prefill_tokens - before.stats.prefill_tokens,
                after.stats.decode_tokens - before.stats.decode_tokens,
            )
        )
    return np.array(rows, np.float64).reshape(-1, 4)


def fit(rows: Floats) -> FittedCosts | None:
    """None with too few seconds of work."""
    if len(rows) < MIN_SAMPLES:
        return None
    found = _solve(rows)
    rng = np.random.default_rng(0)
    again = np.array([_solve(rows[rng.integers(0, len(rows), len(rows))]) for _ in range(ROUNDS)])
    lows, highs = np.percentile(again, [2.5, 97.5], axis=0)
    intervals = {name: (float(lows[index]), float(highs[index])) for index, name in enumerate(PARTS)}
    step_s, prefill_token_s, decode_token_s = map(float, found)
    return FittedCosts(step_s, prefill_token_s, decode_token_s, intervals, len(rows))


def _solve(rows: Floats) -> Floats:
    """The best of all subsets of parts whose solution has no negative part."""
    work, seconds = rows[:, 1:], rows[:, 0]
    best, least = np.zeros(3), float((seconds**2).sum())
    for size in (1, 2, 3):
        for chosen in itertools.combinations(range(3), size):
            solution = np.linalg.lstsq(work[:, chosen], seconds, rcond=None)[0]
            if (solution < 0).any():
                continue
            error = float(((work[:, chosen] @ solution - seconds) ** 2).sum())
            if error < least:
                least, best = error, np.zeros(3)
                best[list(chosen)] = solution
    return best
