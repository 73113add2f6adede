"""What one request gave its client, and figures over many of them with confidence intervals."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from millrace.observe.sketch import quantile
from millrace.observe.slo.objective import Objective

Floats = npt.NDArray[np.float64]
PERCENTILES = (50, 90, 95, 99)


@dataclass(slots=True)
class Record:
    """Times in seconds; latencies count from the intended send time."""

    number: int
    turn: int
    intended_s: float
    """Since the start of the run."""
    sent_s: float = 0.0
    """When it was really sent."""
    ttft_s: float = 0.0
    e2e_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    """Between arrivals of its events."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    error: str = ""
    status: int = 0

    @property
    def tpot_s(self) -> float:
        return (self.e2e_s - self.ttft_s) / max(1, self.output_tokens - 1)

    def value(self, metric: str) -> list[float]:
        """Its values of a metric of an objective."""
        if metric == "itl":
            return self.gaps_s
        if metric == "tpot":
            return [self.tpot_s] if self.output_tokens > 1 else []
        return [{"ttft": self.ttft_s, "e2e": self.e2e_s, "queue": self.sent_s - self.intended_s}[metric]]

    def is_good(self, objectives: tuple[Objective, ...]) -> bool:
        """Goodput: it was answered, and within the limit of every objective. Its own gaps count by their mean."""
        if self.error:
            return False
        return all(
            (float(np.mean(values)) if (values := self.value(objective.metric)) else 0.0) <= objective.limit_s
            for objective in objectives
            if not objective.is_about_errors
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """All requests of the measured interval."""

    records: list[Record]
    seconds: float
    objectives: tuple[Objective, ...] = ()

    @property
    def answered(self) -> list[Record]:
        return [record for record in self.records if not record.error]

    def values(self, metric: str) -> Floats:
        return np.array([value for record in self.answered for value in record.value(metric)])

    @property
    def goodput(self) -> float:
        return sum(record.is_good(self.objectives) for record in self.records) / self.seconds

    def meets(self, objective: Objective) -> bool:
        """Failed requests count as beyond the limit."""
        if objective.is_about_errors:
            return len(self.answered) >= objective.share * len(self.records) - 1e-9
        values = self.values(objective.metric)
        num_failed = len(self.records) - len(self.answered)
        if not len(values):
            return False
        within = (values <= objective.limit_s).sum()
        weight = len(values) / max(1, len(self.answered))  # a failed request counts as many values as others have
        return bool(within >= objective.share * (len(values) + num_failed * weight))

    def summary(self) -> dict[str, Any]:
        answered, seconds = self.answered, self.seconds
        errors: dict[str, int] = {}
        for record in self.records:
            if record.error:
                errors[record.error] = errors.get(record.error, 0) + 1
        met = {str(objective): self.meets(objective) for objective in self.objectives}
        return {
            "seconds": round(seconds, 3),
            "requests": len(self.records),
            "failed": len(self.records) - len(answered),
            "errors": dict(sorted(errors.items(), key=lambda item: -item[1])[:8]),
            "requests_per_s": _rate([1.0] * len(answered), seconds),
            "goodput_per_s": _rate([float(record.is_good(self.objectives)) for record in self.records], seconds),
            "input_tokens_per_s": _rate([record.prompt_tokens for record in answered], seconds),
            "cached_tokens_per_s": _rate([record.cached_tokens for record in answered], seconds),
            "output_tokens_per_s": _rate([record.output_tokens for record in answered], seconds),
            "late_sends_ms": _late(self.records),
            **{f"{metric}_ms": percentiles(self.values(metric)) for metric in ("ttft", "itl", "tpot", "e2e")},
            "objectives": met,
        }


def percentiles(values: Floats) -> dict[str, Any] | None:
    """In milliseconds, each with a 95% interval; None without values."""
    if not len(values):
        return None
    ordered = np.sort(values)
    found: dict[str, Any] = {"n": len(values), "mean": _ms(values.mean()), "max": _ms(ordered[-1])}
    for percent in PERCENTILES:
        low, high = _interval(ordered, percent / 100)
        found[f"p{percent}"] = _ms(quantile(ordered, None, percent / 100) or 0.0)
        found[f"p{percent}_interval"] = [_ms(low), _ms(high)]
    return found


def _ms(seconds: float) -> float:
    return round(1e3 * float(seconds), 3)


def _interval(ordered: Floats, share: float) -> tuple[float, float]:
    """95% interval of a quantile: the order statistics around its rank, by the normal approximation."""
    num = len(ordered)
    half = 1.96 * float(np.sqrt(num * share * (1 - share)))
    low = max(0, int(np.floor(num * share - half)))
    high = min(num - 1, int(np.ceil(num * share + half)))
    return float(ordered[low]), float(ordered[high])


def _rate(amounts: list[float] | list[int], seconds: float) -> dict[str, Any]:
    """Per second, with a 95% interval."""
    values = np.array(amounts, np.float64)
    if not len(values):
        return {"value": 0.0, "interval": [0.0, 0.0]}
    # The number of requests in the interval varies too: as in a Poisson process, its variance is its mean.
    half = 1.96 * float(np.sqrt((values**2).sum()))
    total = float(values.sum())
    low, high = max(0.0, total - half) / seconds, (total + half) / seconds
    return {"value": round(total / seconds, 3), "interval": [round(low, 3), round(high, 3)]}


def _late(records: list[Record]) -> float | None:
    """99th percentile of how late this client sent; large values mean that the client is the bottleneck."""
    late = [record.sent_s - record.intended_s for record in records]
    return _ms(quantile(np.sort(late), None, 0.99) or 0.0) if late else None
