"""From samples to figures, and figures to a table for people or JSON lines for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from millrace.bench.http.drive import Outcome
from millrace.bench.http.target import Sample


@dataclass(frozen=True, slots=True)
class Figure:
    workload: str
    metric: str
    value: float
    unit: str
    requests: int = 0
    note: str = ""

    def as_json(self, **about: str) -> str:
        # JSON has no NaN: a figure that could not be measured is null.
        value = round(self.value, 4) if math.isfinite(self.value) else None
        record = {**about, **asdict(self), "value": value}
        return json.dumps({key: value for key, value in record.items() if value != ""}, ensure_ascii=False)


def figures_of(outcome: Outcome) -> list[Figure]:
    """What one workload showed. Medians of one-at-a-time workloads, percentiles and totals of concurrent ones."""
    name, good = outcome.workload.name, outcome.good
    note = _note(outcome)
    if not good:
        return [Figure(name, "completed", 0, "requests", len(outcome.samples), note)]
    count = len(good)
    ttft_ms = sorted(1000 * (sample.first_token_at - sample.started_at) for sample in good if sample.chunks)
    tpot_ms = sorted(1000 * t for t in map(_seconds_per_token, good) if t is not None)
    output = sum(sample.output_tokens for sample in good)
    found = [Figure(name, "TTFT p50", percentile(ttft_ms, 50), "ms", count, note)]
    if outcome.workload.at_once > 1:
        found.append(Figure(name, "TTFT p99", percentile(ttft_ms, 99), "ms", count))
    if tpot_ms and not name.startswith("prefix-"):
        found.append(Figure(name, "TPOT p50", percentile(tpot_ms, 50), "ms", count))
        if outcome.workload.at_once == 1:
            found.append(Figure(name, "decode", 1000 / percentile(tpot_ms, 50), "tok/s", count))
    if outcome.workload.at_once > 1:
        found.append(Figure(name, "output", output / outcome.wall_s, "tok/s", count))
        found.append(Figure(name, "wall", outcome.wall_s, "s", count))
    cached = sum(sample.cached_tokens for sample in good)
    if cached:
        found.append(
            Figure(name, "prompt tokens cached", 100 * cached / sum(s.prompt_tokens for s in good), "%", count)
        )
    return found


def _seconds_per_token(sample: Sample) -> float | None:
    if sample.output_tokens < 2 or sample.chunks < 2:
        return None
    return (sample.last_token_at - sample.first_token_at) / (sample.output_tokens - 1)


def _note(outcome: Outcome) -> str:
    """Anything that makes the figures of this workload less than they seem."""
    parts = []
    if outcome.errors:
        parts.append(f"{len(outcome.errors)} failed, the first with: {outcome.errors[0]}")
    if outcome.unsent:
        parts.append(f"{outcome.unsent} of {len(outcome.workload.shapes)} not done within the time limit")
    wanted = sum(shape.output_tokens for shape in outcome.workload.shapes) / len(outcome.workload.shapes)
    got = sum(sample.output_tokens for sample in outcome.good) / max(len(outcome.good), 1)
    if outcome.good and not outcome.unsent and not outcome.errors and got < 0.98 * wanted:
        parts.append(f"answers ended early: {got:.0f} tokens on average instead of {wanted:.0f}")
    return "; ".join(parts)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Linear interpolation between the two nearest of an ascending sequence."""
    if not ordered:
        return float("nan")
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def print_table(figures: Iterable[Figure], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold")
    for column in ("workload", "figure", "value", "unit", "n"):
        table.add_column(column, justify="right" if column in ("value", "n") else "left", no_wrap=True)
    table.add_column("note", style="yellow")
    last = ""
    for figure in figures:
        if last and figure.workload != last:
            table.add_section()
        name = "" if figure.workload == last else figure.workload
        last = figure.workload
        count = str(figure.requests) if figure.requests else ""
        table.add_row(name, figure.metric, readable(figure.value, figure.metric), figure.unit, count, figure.note)
    Console().print(table)


def readable(value: float, metric: str = "") -> str:
    """Three digits, which is more than a noisy machine knows; four of perplexity, where the last ones are the news."""
    if metric == "perplexity":
        return f"{value:.2f}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 100 else f"{value:.1f}"
