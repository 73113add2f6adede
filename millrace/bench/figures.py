"""A measured figure, as a JSON line or in a table, and percentiles."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Figure:
    workload: str
    metric: str
    value: float
    unit: str
    requests: int = 0
    note: str = ""

    def as_json(self, **about: str) -> str:
        # JSON has no NaN: a figure without a value is null.
        value = round(self.value, 4) if math.isfinite(self.value) else None
        record = {**about, **asdict(self), "value": value}
        return json.dumps({key: value for key, value in record.items() if value != ""}, ensure_ascii=False)


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between the two nearest values, as NumPy does by default; NaN if there are none."""
    return float(np.percentile(values, percent)) if len(values) else float("nan")


def print_table(figures: Iterable[Figure], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    figures = list(figures)
    has_notes = any(figure.note for figure in figures)
    table = Table(title=title, title_justify="left", title_style="bold")
    # In a narrow terminal names are folded; figures are never cut.
    table.add_column("workload")
    table.add_column("figure")
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("unit", no_wrap=True)
    table.add_column("n", justify="right", no_wrap=True)
    if has_notes:
        table.add_column("note", style="yellow")
    last = ""
    for figure in figures:
        if last and figure.workload != last:
            table.add_section()
        name = "" if figure.workload == last else figure.workload
        last = figure.workload
        count = str(figure.requests) if figure.requests else ""
        cells = (name, figure.metric, readable(figure.value, figure.metric), figure.unit, count)
        table.add_row(*cells, *((figure.note,) if has_notes else ()))
    Console().print(table)


def readable(value: float, metric: str = "") -> str:
    """Three significant digits; perplexity with two decimals, since small differences matter there."""
    if metric == "perplexity":
        return f"{value:.2f}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 100 else f"{value:.1f}"
