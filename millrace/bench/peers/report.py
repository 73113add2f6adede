"""The results of a comparison as tables and as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TextIO

from millrace.bench.figures import Figure, readable
from millrace.bench.peers.bars import Key, ResultTable, Verdict

NONE = "–"
_PLAIN_WIDTH = 150
_LAST = ("quality", "server", "machine")
"""Shown below the workloads, in this order."""


def figure_line(engine: str, number: int, figure: Figure) -> str:
    return figure.as_json(kind="figure", engine=engine, round=str(number))


def median_lines(results: ResultTable) -> Iterable[str]:
    for key in results.keys:
        for engine in results.engines:
            values = results.values(engine, key)
            if values:
                record = {
                    "kind": "median", "engine": engine, "workload": key[0], "metric": key[1],
                    "value": round(results.median(engine, key) or 0.0, 4), "unit": results.unit(key),
                    "rounds": len(values), "least": round(min(values), 4), "most": round(max(values), 4),
                }  # fmt: skip
                yield json.dumps(record, ensure_ascii=False)


def verdict_line(verdict: Verdict) -> str:
    bar = verdict.bar
    record = {
        "kind": "verdict", "workload": bar.workload, "metric": bar.metric, "unit": bar.unit,
        "millrace": _rounded(verdict.ours), "peer": verdict.against or None, "peer_value": _rounded(verdict.theirs),
        "ratio": _rounded(verdict.ratio) if bar.peers else None, "bar": bar.limit, "goal": bar.goal,
        "met": verdict.met, "goal_met": verdict.goal_met, "absent": list(verdict.absent) or None,
    }  # fmt: skip
    return json.dumps({key: value for key, value in record.items() if value is not None}, ensure_ascii=False)


def print_tables(results: ResultTable, verdicts: Sequence[Verdict], notes: Sequence[str], stream: TextIO) -> None:
    from rich.console import Console

    console = Console(file=stream, width=None if stream.isatty() else _PLAIN_WIDTH, highlight=False)
    console.print(_medians(results))
    if verdicts:
        console.print(_verdicts(verdicts))
    for note in notes:
        console.print(f"• {note}", style="yellow", markup=False)


def _medians(results: ResultTable) -> object:
    from rich.table import Table

    table = Table(title="Medians over the rounds (min–max)", title_justify="left", title_style="bold")
    table.add_column("workload")
    table.add_column("figure", no_wrap=True)
    for engine in results.engines:
        table.add_column(engine, justify="right")
    table.add_column("unit")
    last = ""
    for key in sorted(results.keys, key=lambda key: _LAST.index(key[0]) if key[0] in _LAST else -1):
        if last and key[0] != last:
            table.add_section()
        name, last = ("" if key[0] == last else key[0]), key[0]
        table.add_row(name, key[1], *(_cell(results, engine, key) for engine in results.engines), results.unit(key))
    return table


def _cell(results: ResultTable, engine: str, key: Key) -> str:
    values = results.values(engine, key)
    if not values:
        return NONE
    middle = _shown(results.median(engine, key), key[1])
    return middle if len(values) == 1 else f"{middle} ({readable(min(values))}–{readable(max(values))})"


def _verdicts(verdicts: Sequence[Verdict]) -> object:
    from rich.table import Table

    table = Table(title="Millrace against the bars", title_justify="left", title_style="bold")
    for column in ("workload", "figure", "Millrace", "best peer", "ratio", "bar", "goal", "", "remark"):
        right = column in ("Millrace", "best peer", "ratio")
        table.add_column(column, justify="right" if right else "left")
    for verdict in verdicts:
        table.add_row(*verdict_cells(verdict))
    return table


def verdict_cells(verdict: Verdict) -> list[str]:
    bar = verdict.bar
    sign, times = ("≥" if bar.more_is_better else "≤"), ("×" if bar.peers else f" {bar.unit}")
    peer = f"{_shown(verdict.theirs, bar.metric)} {verdict.against}" if verdict.against else NONE
    ratio = f"{verdict.ratio:.2f}×" if bar.peers and verdict.ratio is not None else NONE
    mark = {True: "✓", False: "✗", None: "?"}[verdict.met]
    goal = NONE if bar.goal is None else f"{sign} {bar.goal:g}{times}{' ✓' if verdict.goal_met else ''}"
    remark = f"without {' and '.join(verdict.absent)}" if verdict.absent else ""
    own, limit = f"{_shown(verdict.ours, bar.metric)} {bar.unit}", f"{sign} {bar.limit:g}{times}"
    return [bar.workload, bar.metric, own, peer, ratio, limit, goal, mark, remark]


def _shown(value: float | None, metric: str) -> str:
    return NONE if value is None else readable(value, metric)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
