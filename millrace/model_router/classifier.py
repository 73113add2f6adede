"""A logistic regression: how probable it is that the small model's answer is good enough."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from millrace.errors import ConfigError
from millrace.model_router.features import NUM_FEATURES, Floats, name_of

VERSION = 1
RIDGE = 3.0
"""Strength of the penalty on weights, in examples."""
STEPS = 50
MAX_WEIGHT_STEP = 1e-8


class Classifier(msgspec.Struct, frozen=True):
    """Weights over standardised columns."""

    weights: tuple[float, ...]
    intercept: float
    means: tuple[float, ...]
    scales: tuple[float, ...]
    num_examples: int
    version: int = VERSION

    def probability(self, features: Floats) -> float:
        """That the small model is good enough."""
        score = float(self._parts(features).sum()) + self.intercept
        return float(1.0 / (1.0 + np.exp(-np.clip(score, -50.0, 50.0))))

    def reasons(self, features: Floats, count: int = 3) -> list[tuple[str, float]]:
        """The columns that count most, positive for the small model."""
        parts = self._parts(features)
        order = np.argsort(-np.abs(parts), kind="stable")[:count]
        return [(name_of(int(index)), round(float(parts[index]), 3)) for index in order if parts[index]]

    def _parts(self, features: Floats) -> Floats:
        scaled = (features - np.array(self.means)) / np.array(self.scales)
        parts: Floats = scaled * np.array(self.weights)
        return parts


def train(rows: Sequence[Floats], is_enough: Sequence[bool]) -> Classifier:
    """Newton's method with a ridge. The same data gives the same weights."""
    if len(rows) < 2 or len(set(is_enough)) < 2:
        raise ConfigError(
            f"Training needs requests on which the small model is good enough and others; there are {len(rows)}, of one"
            " kind.",
            param="data",
        )
    table, wanted = np.stack(rows), np.array(is_enough, float)
    means, scales = table.mean(0), table.std(0)
    scales[scales < 1e-9] = 1.0
    scaled = np.hstack((np.ones((len(table), 1)), (table - means) / scales))
    ridge = np.full(scaled.shape[1], RIDGE)
    ridge[0] = 1e-6
    weights = np.zeros(scaled.shape[1])
    for _ in range(STEPS):
        chance = 1.0 / (1.0 + np.exp(-np.clip(scaled @ weights, -50.0, 50.0)))
        slope = scaled.T @ (wanted - chance) - ridge * weights
        curve = (scaled * (chance * (1 - chance))[:, None]).T @ scaled + np.diag(ridge)
        step = np.linalg.solve(curve, slope)
        weights += step
        if float(np.abs(step).max()) < MAX_WEIGHT_STEP:
            break
    return Classifier(
        weights=tuple(weights[1:].tolist()),
        intercept=float(weights[0]),
        means=tuple(means.tolist()),
        scales=tuple(scales.tolist()),
        num_examples=len(rows),
    )


def save(classifier: Classifier, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(classifier), indent=0))


def load(path: Path) -> Classifier:
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Classifier)
    except OSError as error:
        raise ConfigError(f"Cannot read the router {path}: {error.strerror}.", param="router") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is no router that `millrace router train` wrote: {error}", param="router") from error
    if found.version != VERSION or {len(found.weights), len(found.means), len(found.scales)} != {NUM_FEATURES}:
        raise ConfigError(f"{path} was trained by another version of Millrace; train it again.", param="router")
    return found
