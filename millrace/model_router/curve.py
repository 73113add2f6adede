"""The cost–quality curve: what a threshold costs and how good the answers are, against a random mix of the models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

import msgspec

from millrace.model_router.examples import Example


class Point(msgspec.Struct, frozen=True):
    threshold: float
    large_share: float
    """Share of the requests that the large model answers."""
    cost: float
    """Per request, relative to the large model for everything."""
    quality: float
    """Mean over the requests."""
    random_quality: float
    """Of a random choice with the same cost."""


def curve(
    examples: Sequence[Example], score: Callable[[Example], float], *, price_ratio: float, is_cascade: bool
) -> list[Point]:
    """One point per threshold. `score`: high means small. With a cascade the small model's answer is always paid."""
    all_large = sum(one.large_tokens for one in examples) * price_ratio
    small_cost = sum(one.small_tokens for one in examples) / all_large
    small, large = (sum(values) / len(examples) for values in _qualities(examples))
    points = []
    for step in range(21):
        threshold = step / 20
        to_large = [score(one) < threshold for one in examples]
        cost = quality = 0.0
        for one, is_large in zip(examples, to_large, strict=True):
            quality += one.large if is_large else one.small
            cost += one.large_tokens * price_ratio if is_large else 0.0
            cost += one.small_tokens if is_cascade or not is_large else 0.0
        cost /= all_large
        share = min(1.0, max(0.0, (cost - small_cost) / max(1e-9, 1.0 - small_cost)))
        points.append(
            Point(
                threshold,
                sum(to_large) / len(examples),
                cost,
                quality / len(examples),
                small + share * (large - small),
            )
        )
    return points


def _qualities(examples: Sequence[Example]) -> tuple[list[float], list[float]]:
    return [one.small for one in examples], [one.large for one in examples]


def auc(examples: Sequence[Example], score: Callable[[Example], float], tolerance: float) -> float:
    """Probability that a request for the small model has a higher score than one for the large; 0.5 is chance."""
    enough = [score(one) for one in examples if one.small >= one.large - tolerance]
    lacking = [score(one) for one in examples if one.small < one.large - tolerance]
    if not enough or not lacking:
        return 0.5
    wins = sum((high > low) + 0.5 * (high == low) for high in enough for low in lacking)
    return wins / (len(enough) * len(lacking))


def plot(points: Sequence[Point], title: str) -> str:
    """The curve as an SVG."""
    width, height, left, top = 640, 400, 60, 40
    low = min(min(one.quality, one.random_quality) for one in points)
    high = max(max(one.quality, one.random_quality) for one in points)
    most = max(1.0, *(one.cost for one in points))
    span = max(high - low, 1e-6)

    def at(cost: float, quality: float) -> str:
        across, up = left + cost / most * (width - left - 20), (quality - low) / span
        return f"{across:.1f},{height - 50 - up * (height - 50 - top):.1f}"

    routed = " ".join(at(one.cost, one.quality) for one in sorted(points, key=lambda one: one.cost))
    random = " ".join(at(one.cost, one.random_quality) for one in sorted(points, key=lambda one: one.cost))
    dots = "".join(
        '<circle cx="{}" cy="{}" r="3" fill="#1f6feb"/>'.format(*at(one.cost, one.quality).split(",")) for one in points
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">'
        f'<rect width="{width}" height="{height}" fill="white"/><text x="{left}" y="22">{escape(title)}</text>'
        f'<polyline points="{random}" fill="none" stroke="#999" stroke-dasharray="5 4"/>'
        f'<polyline points="{routed}" fill="none" stroke="#1f6feb" stroke-width="2"/>{dots}'
        f'<text x="{left}" y="{height - 15}">cost per request, 1 = the large model for all</text>'
        f'<text x="8" y="{top + 5}">{high:.3f}</text><text x="8" y="{height - 50}">{low:.3f}</text>'
        f'<text x="{width - 190}" y="{top + 10}" fill="#666">dashed: random choice</text></svg>\n'
    )
