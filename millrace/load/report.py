"""The report of a run: JSON, a table for the terminal, one HTML file with plots, and the comparison of two reports."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import numpy as np

from millrace.errors import ConfigError
from millrace.load.records import Outcome
from millrace.load.svg import Line, plot
from millrace.load.sweep import Sweep
from millrace.observe.sketch import quantile

VERSION = 1
_STYLE = (
    "body{font:14px/1.5 sans-serif;max-width:1360px;margin:2em auto;padding:0 1em;color:#111}"
    "table{border-collapse:collapse}td,th{padding:.25em .8em;border-bottom:1px solid #ddd;text-align:right}"
    "td:first-child,th:first-child{text-align:left}.plots{display:flex;flex-wrap:wrap;gap:1em}pre{background:#f5f5f5;"
    "padding:1em;overflow:auto}"
)


def report_of(
    settings: dict[str, Any], outcome: Outcome, bottleneck: str, server: dict[str, Any] | None
) -> dict[str, Any]:
    return {
        "object": "load.report",
        "version": VERSION,
        "settings": settings,
        "summary": outcome.summary(),
        "bottleneck": bottleneck,
        "server": server,
        "requests": [
            [
                round(record.intended_s, 4),
                round(1e3 * record.ttft_s, 2),
                round(1e3 * record.e2e_s, 2),
                record.prompt_tokens,
                record.output_tokens,
                record.error,
            ]
            for record in outcome.records
        ],
    }


_COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")


def table(summary: dict[str, Any]) -> str:
    lines = [
        f"{summary['requests']} requests in {summary['seconds']:.1f} s, {summary['failed']} failed",
        f"  requests/s       {_with_interval(summary['requests_per_s'])}",
        f"  goodput/s        {_with_interval(summary['goodput_per_s'])}",
        f"  input tokens/s   {_with_interval(summary['input_tokens_per_s'])}",
        f"  output tokens/s  {_with_interval(summary['output_tokens_per_s'])}",
        f"  {'ms':<5}{'n':>7}" + "".join(f"{name:>7}" for name in _COLUMNS) + "   95% of p95",
    ]
    for name in ("ttft", "itl", "tpot", "e2e"):
        found = summary[f"{name}_ms"]
        if found is not None:
            cells = f"{found.get('n', ''):>7}" + "".join(f"{_ms(found[key]):>7}" for key in _COLUMNS)
            low, high = found["p95_interval"]
            lines.append(f"  {name:<5}{cells}   {_ms(low)} to {_ms(high)}")
    for objective, is_met in summary["objectives"].items():
        lines.append(f"  {'met   ' if is_met else 'MISSED'} {objective}")
    for error, count in summary["errors"].items():
        lines.append(f"  {count} × {error}")
    return "\n".join(lines)


def _ms(value: float) -> str:
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _with_interval(rate: dict[str, Any]) -> str:
    low, high = rate["interval"]
    return f"{rate['value']:>10.2f}   ({low:.2f} to {high:.2f})"


def html_report(report: dict[str, Any], outcome: Outcome, sweep: Sweep | None = None) -> str:
    answered = outcome.answered
    times = [record.intended_s for record in answered]
    plots = [
        plot(
            "TTFT over time", [Line("ttft", times, [1e3 * record.ttft_s for record in answered], dots=True)], "s", "ms"
        ),
        _distribution("TTFT", 1e3 * outcome.values("ttft")),
        _distribution("Inter-token latency", 1e3 * outcome.values("itl")),
        _distribution("End to end", 1e3 * outcome.values("e2e")),
        _throughput(outcome),
    ]
    if sweep is not None:
        plots.insert(0, _sweep_plot(sweep))
    settings = html.escape(json.dumps(report["settings"], indent=1))
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>millrace load</title><style>{_STYLE}</style>"
        f"<h1>Load report</h1><p>{html.escape(str(report['settings'].get('url')))},"
        f" {html.escape(str(report['settings'].get('model')))}</p><pre>{html.escape(table(report['summary']))}</pre>"
        f"<p>Bottleneck: {html.escape(report['bottleneck'])}</p>{_sweep_table(sweep)}"
        f'<div class="plots">{"".join(plots)}</div><h2>Settings</h2><pre>{settings}</pre></html>'
    )


def _distribution(title: str, values: Any) -> str:
    ordered = np.sort(values)
    if not len(ordered):
        return ""
    shares = np.linspace(0, 100, min(200, len(ordered)))
    points = np.percentile(ordered, shares)
    return plot(f"{title}: cumulative", [Line("", points.tolist(), shares.tolist())], "ms", "%", log_x=True)


def _throughput(outcome: Outcome) -> str:
    ends = np.array([record.intended_s + record.e2e_s for record in outcome.answered])
    tokens = np.array([record.output_tokens for record in outcome.answered], np.float64)
    if not len(ends):
        return ""
    counts, edges = np.histogram(ends, bins=min(60, max(4, len(ends))), weights=tokens)
    width = edges[1] - edges[0]
    return plot(
        "Output tokens of ended requests",
        [Line("", edges[1:].tolist(), (counts / width).tolist())],
        "s",
        "tokens/s",
    )


def _sweep_plot(sweep: Sweep) -> str:
    points = sorted(sweep.points, key=lambda point: point.rate)
    rates = [point.rate for point in points]
    lines = [
        Line(f"ttft p{percent}", rates, [1e3 * _quantile(point.outcome, percent) for point in points])
        for percent in (50, 95)
    ]
    return plot("TTFT by rate", lines, "requests/s", "ms")


def _quantile(outcome: Outcome, percent: float) -> float:
    values = outcome.values("ttft")
    found = quantile(np.sort(values), None, percent / 100)
    return found if found is not None else float("nan")


def _sweep_table(sweep: Sweep | None) -> str:
    if sweep is None:
        return ""
    rows = "".join(
        f"<tr><td>{point.rate:.2f}</td><td>{'met' if point.is_met else 'missed'}</td>"
        f"<td>{point.outcome.goodput:.2f}</td><td style='text-align:left'>{html.escape(point.bottleneck)}</td></tr>"
        for point in sorted(sweep.points, key=lambda point: point.rate)
    )
    return f"<table><tr><th>requests/s<th>objectives<th>goodput/s<th>bottleneck</tr>{rows}</table>"


def read_report(path: Path) -> dict[str, Any]:
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"The report {path} cannot be read: {error}.") from error
    if not isinstance(report, dict) or report.get("object") != "load.report":
        raise ConfigError(f"{path} is not a report of `millrace load --json`.")
    return report


def compare(first: dict[str, Any], second: dict[str, Any]) -> str:
    """A difference counts only if the intervals do not overlap."""
    lines = [f"{'':<22}{'A':>12}{'B':>12}{'B / A':>9}   verdict"]
    for name in ("requests_per_s", "goodput_per_s", "output_tokens_per_s"):
        a, b = first["summary"][name], second["summary"][name]
        lines.append(_compared(name, a["value"], b["value"], a["interval"], b["interval"], more_is_better=True))
    for metric in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms"):
        a, b = first["summary"][metric], second["summary"][metric]
        if a is None or b is None:
            continue
        for percent in ("p50", "p95", "p99"):
            intervals = a[f"{percent}_interval"], b[f"{percent}_interval"]
            lines.append(_compared(f"{metric} {percent}", a[percent], b[percent], *intervals, more_is_better=False))
    return "\n".join(lines)


def _compared(name: str, a: float, b: float, of_a: list[float], of_b: list[float], *, more_is_better: bool) -> str:
    if of_a[0] <= of_b[1] and of_b[0] <= of_a[1]:
        verdict = "no clear difference"
    else:
        verdict = "B is better" if (b > a) == more_is_better else "A is better"
    ratio = f"{b / a:.2f}" if a else "-"
    return f"{name:<22}{a:>12.2f}{b:>12.2f}{ratio:>9}   {verdict}"
