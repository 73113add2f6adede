"""A Grafana dashboard as JSON, generated from the same objectives as the alert rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from millrace.observe.slo.objective import Objective
from millrace.observe.slo.rules import burn_rate_query
from millrace.observe.slo.tracker import WINDOWS_S

RANGE = "[1m]"
PER_ROW, WIDTH, HEIGHT = 3, 8, 8


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    """Query and legend."""


def _percentiles(metric: str) -> tuple[tuple[str, str], ...]:
    return tuple(
        (f"histogram_quantile({share}, sum by (le) (rate(millrace_{metric}_seconds_bucket{RANGE})))", f"p{share:.0%}")
        for share in (0.5, 0.95, 0.99)
    )


def _rate(metric: str, legend: str, by: str = "") -> tuple[str, str]:
    return (f"sum{f' by ({by})' if by else ''} (rate({metric}{RANGE}))", legend)


def _per_step(part: str) -> tuple[str, str]:
    steps = f"rate(millrace_engine_steps_total{RANGE})"
    return (f"rate(millrace_engine_{part}_seconds_total{RANGE}) / {steps}", part)


def panels(objectives: tuple[Objective, ...]) -> list[Panel]:
    tokens = tuple(_rate(f"millrace_engine_{kind}_tokens_total", kind) for kind in ("prompt", "output", "prefix_hit"))
    hits, looked_up = (f"rate(millrace_engine_prefix_{kind}_tokens_total{RANGE})" for kind in ("hit", "query"))
    found = [
        Panel("Time to first token", "s", _percentiles("ttft")),
        Panel("Inter-token latency", "s", _percentiles("itl")),
        Panel("Time in the queue", "s", _percentiles("queue")),
        Panel("Tokens", "short", tokens),
        Panel("Requests", "reqps", (_rate("millrace_requests_total", "{{status}}", "status"),)),
        Panel("Running", "short", (("millrace_running_by_class", "{{priority}}"),)),
        Panel("Waiting", "short", (("millrace_waiting_by_class", "{{priority}}"),)),
        Panel("KV blocks", "short", (("millrace_kv_blocks", "{{state}}"),)),
        Panel("Prefix hits", "percentunit", ((f"{hits} / {looked_up}", "hit rate"),)),
        Panel("Time per step", "s", tuple(_per_step(part) for part in ("plan", "launch", "device", "apply"))),
        Panel("Errors", "reqps", (_rate("millrace_errors_total", "{{code}}", "code"),)),
        Panel("Preemptions", "short", (_rate("millrace_engine_preemptions_by_reason_total", "{{reason}}", "reason"),)),
    ]
    for objective in objectives:
        burns = tuple((burn_rate_query(objective, window), window) for window in WINDOWS_S)
        left = (f'millrace_slo_budget_left_ratio{{slo="{objective.name}"}}', "budget left")
        found.append(Panel(f"Burn rate: {objective}", "short", (*burns, left)))
    return found


def grafana_dashboard(objectives: tuple[Objective, ...]) -> dict[str, Any]:
    return {
        "title": "Millrace",
        "uid": "millrace",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [{"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"}]
        },
        "panels": [_panel(index, panel) for index, panel in enumerate(panels(objectives))],
    }


def _panel(index: int, panel: Panel) -> dict[str, Any]:
    return {
        "id": index + 1,
        "type": "timeseries",
        "title": panel.title,
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "gridPos": {"x": index % PER_ROW * WIDTH, "y": index // PER_ROW * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + number), "expr": query, "legendFormat": legend}
            for number, (query, legend) in enumerate(panel.queries)
        ],
    }
