"""Finds the highest rate that meets the objectives: doubles it until one is missed, then halves the interval."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from millrace.load.records import Outcome

MAX_POINTS = 16


@dataclass(frozen=True, slots=True)
class Point:
    rate: float
    outcome: Outcome
    is_met: bool
    bottleneck: str = ""


@dataclass(slots=True)
class Sweep:
    points: list[Point] = field(default_factory=list)
    """In the order in which they were measured."""

    @property
    def best(self) -> Point | None:
        met = [point for point in self.points if point.is_met]
        return max(met, key=lambda point: point.rate) if met else None

    @property
    def knee(self) -> Point | None:
        """The lowest rate that missed an objective."""
        missed = [point for point in self.points if not point.is_met]
        return min(missed, key=lambda point: point.rate) if missed else None


Measure = Callable[[float], Awaitable[Point]]


async def find_highest_rate(
    measure: Measure, first: float, precision: float = 0.1, on_point: Callable[[Point], None] = lambda point: None
) -> Sweep:
    """`precision`: stop when the highest met and the lowest missed rate differ by this share."""
    sweep, rate = Sweep(), first
    while len(sweep.points) < MAX_POINTS:
        point = await measure(rate)
        sweep.points.append(point)
        on_point(point)
        best, knee = sweep.best, sweep.knee
        if knee is None:
            rate *= 2
        elif best is None:
            rate /= 2
            if rate < first / 64:
                break
        elif knee.rate / best.rate <= 1 + precision:
            break
        else:
            rate = (best.rate * knee.rate) ** 0.5
    return sweep
