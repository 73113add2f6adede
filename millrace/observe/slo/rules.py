"""Prometheus alert rules for objectives: several windows and burn rates, so that fast and slow burns both page once."""

from __future__ import annotations

import json

from millrace.observe.slo.objective import Objective

BURNS = (
    ("fast", 14.4, "1h", "5m", "page"),
    ("medium", 6.0, "6h", "30m", "page"),
    ("slow", 1.0, "3d", "6h", "ticket"),
)
"""Name, burn rate, long and short window, severity. The short window ends the alert soon after the burn."""


def burn_rate_query(objective: Objective, window: str) -> str:
    if objective.is_about_errors:
        kinds, labels = ("failed", "asked"), ""
        if objective.adapter:
            kinds, labels = ("adapter_failed", "adapter_asked"), f'{{adapter="{objective.adapter}"}}'
        failed, asked = (f"sum(rate(millrace_{kind}_requests_total{labels}[{window}]))" for kind in kinds)
        return f"{failed} / {asked} / {1 - objective.share:.6g}"
    series = f'{{slo="{objective.name}"}}[{window}]'
    good, total = f"rate(millrace_slo_good_events_total{series})", f"rate(millrace_slo_events_total{series})"
    return f"(1 - {good} / {total}) / {1 - objective.share:.6g}"


def alert_rules(objectives: tuple[Objective, ...]) -> str:
    """A rule file in YAML."""
    lines = ["groups:", "  - name: millrace", "    rules:"]
    for objective in objectives:
        for name, burn, long, short, severity in BURNS:
            # A burn rate cannot exceed 1 / (1 - share), so loose objectives get a lower threshold.
            threshold = min(burn, 0.5 / (1 - objective.share))
            queries = [f"({burn_rate_query(objective, window)}) > {threshold:.6g}" for window in (long, short)]
            text = f"{objective}: the error budget burns {threshold:.3g} times as fast as it may ({long} and {short})"
            lines += _rule(f"MillraceSlo_{objective.name}_{name}", " and ".join(queries), "1m", severity, text)
    down = "min(millrace_engine_ready) == 0"
    lines += _rule("MillraceNotReady", down, "2m", "page", "the engine makes no progress")
    errors = 'sum(rate(millrace_requests_total{status=~"5.."}[5m])) / sum(rate(millrace_requests_total[5m])) > 0.01'
    lines += _rule("MillraceErrors", errors, "5m", "page", "more than 1% of the requests fail")
    memory = 'sum(rate(millrace_engine_preemptions_by_reason_total{reason="memory"}[10m])) > 0.1'
    text = "KV memory runs out: requests are preempted for lack of blocks more than once in ten seconds"
    lines += _rule("MillraceKvOutOfMemory", memory, "10m", "ticket", text)
    disk = "sum(increase(millrace_engine_disk_copies_failed_total[10m])) > 0"
    text = "KV blocks cannot be written to --kv-disk or read from it: their tokens are computed again"
    lines += _rule("MillraceKvDisk", disk, "10m", "ticket", text)
    lost, evicted = (f"sum(rate(millrace_engine_{name}_total[10m]))" for name in ("host_blocks_lost", "evictions"))
    text = "more than a tenth of the evicted KV blocks leave the device before they are in host memory"
    lines += _rule("MillraceKvBlocksLost", f"{lost} > 0.1 * {evicted}", "10m", "ticket", text)
    return "\n".join(lines) + "\n"


def _rule(name: str, query: str, after: str, severity: str, text: str) -> list[str]:
    return [
        f"      - alert: {name}",
        f"        expr: {json.dumps(query)}",
        f"        for: {after}",
        "        labels:",
        f"          severity: {severity}",
        "        annotations:",
        f"          summary: {json.dumps(text)}",
    ]
