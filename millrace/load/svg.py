"""Small plots as SVG text, without a plotting library: lines with axes, for reports that are one file."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 260, 64, 16, 28, 40
COLOURS = ("#2563eb", "#dc2626", "#059669", "#9333ea", "#d97706", "#0891b2")


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    dots: bool = False


def plot(title: str, lines: Sequence[Line], x_label: str, y_label: str, *, log_x: bool = False) -> str:
    points = [(x, y) for line in lines for x, y in zip(line.xs, line.ys, strict=True) if math.isfinite(y)]
    if not points:
        return f"<p>{html.escape(title)}: no values.</p>"
    xs = [math.log10(max(x, 1e-9)) if log_x else x for x, _ in points]
    low_x, high_x = min(xs), max(xs)
    high_y = max(y for _, y in points) or 1.0
    span_x = (high_x - low_x) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        at = math.log10(max(x, 1e-9)) if log_x else x
        across = LEFT + (WIDTH - LEFT - RIGHT) * (at - low_x) / span_x
        return across, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * y / high_y

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" font-family="sans-serif" font-size="11">',
        f'<text x="{LEFT}" y="16" font-size="13" font-weight="bold">{html.escape(title)}</text>',
    ]
    for tick in ticks(0.0, high_y):
        _, y = place(points[0][0], tick)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in ticks(low_x, high_x):
        x, _ = place(10**tick if log_x else tick, 0)
        label = f"{10**tick:.3g}" if log_x else f"{tick:g}"
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{label}</text>')
    for index, line in enumerate(lines):
        colour = COLOURS[index % len(COLOURS)]
        placed = [place(x, y) for x, y in zip(line.xs, line.ys, strict=True) if math.isfinite(y)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        if line.dots:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in placed]
        else:
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        parts.append(
            f'<text x="{WIDTH - RIGHT - 4}" y="{TOP + 4 + 14 * index}" text-anchor="end" fill="{colour}">'
            f"{html.escape(line.name)}</text>"
        )
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 6}" text-anchor="middle">{html.escape(x_label)}</text>')
    parts.append(
        f'<text transform="translate(12 {HEIGHT / 2}) rotate(-90)" text-anchor="middle">{html.escape(y_label)}</text>'
    )
    return "".join([*parts, "</svg>"])


def svg_file(drawn: str) -> str:
    """A plot as a file of its own."""
    return drawn.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" style="background:white" ', 1) + "\n"


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers between two values."""
    span = (high - low) or 1.0
    size = 10 ** math.floor(math.log10(span / most))
    step = next(size * factor for factor in (1, 2, 5, 10, 20) if span / (size * factor) <= most)
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 10) for number in range(first, math.floor(high / step + 1e-9) + 1)]
