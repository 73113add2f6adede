"""Distributions of prompt and output lengths: `256`, `uniform:16:512`, `lognormal:200:0.8`, `exponential:128`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from millrace.errors import ConfigError

_FORMS = {"uniform": "uniform:LOW:HIGH", "lognormal": "lognormal:MEDIAN:SIGMA", "exponential": "exponential:MEAN"}


@dataclass(frozen=True, slots=True)
class Lengths:
    kind: str
    first: float
    second: float = 0.0

    def __call__(self, rng: np.random.Generator) -> int:
        if self.kind == "uniform":
            return int(rng.integers(int(self.first), int(self.second) + 1))
        if self.kind == "lognormal":
            return max(1, round(self.first * float(np.exp(rng.normal(0.0, self.second)))))
        if self.kind == "exponential":
            return max(1, round(float(rng.exponential(self.first))))
        return int(self.first)


def parse_lengths(text: str, what: str) -> Lengths:
    kind, *raw = text.split(":")
    try:
        numbers = [float(part) for part in raw]
        if not raw:
            found = Lengths("fixed", int(kind))
        elif kind in _FORMS and len(numbers) == _FORMS[kind].count(":"):
            found = Lengths(kind, *numbers)
        else:
            found = Lengths("", 0)
    except ValueError:
        found = Lengths("", 0)
    is_valid = found.first >= 1 and found.second >= 0 and (kind != "uniform" or found.second >= found.first)
    if not found.kind or not is_valid:
        raise ConfigError(f"{what} is {text!r}; it must be one of N, {', '.join(_FORMS.values())}.", param=what)
    return found
