"""`millrace top`: a live table of a running server."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from millrace.terminal.server_options import add_server, ask_server

USAGE = "millrace top [--url URL] [--once] [--every SECONDS]"
EXAMPLES = """\
examples:
  millrace top             refresh every two seconds; stop with Ctrl-C
  millrace top --once      print one table"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the server's answer once")
    add_server(parser)
    parser.add_argument("--once", action="store_true", help="print one table and stop")
    parser.add_argument("--every", type=float, default=2.0, metavar="X", help="seconds between tables (default: 2)")


def run(args: argparse.Namespace) -> int:
    asked_of_all = argparse.Namespace(**{**vars(args), "model": ""})
    while True:
        stats = ask_server(args, "/v1/stats", window=60, step=5)
        running = ask_server(asked_of_all, "/v1/requests")["data"]
        if args.json:
            print(json.dumps({**stats, "requests": running}))
            return 0
        if not args.once and sys.stdout.isatty():
            print("\033[H\033[2J", end="")
        print("\n".join(table(stats, running)), flush=True)
        if args.once:
            return 0
        time.sleep(max(0.2, args.every))


def table(stats: dict[str, Any], running: list[dict[str, Any]]) -> list[str]:
    now, series = stats["now"], stats["series"]
    state = "ready" if now["ready"] else f"not ready: {now['reason']}"
    fronts = "1 front" if now["fronts"] == 1 else f"{now['fronts']} fronts"
    lines = [f"{stats['model']}: {state}, up {stats['uptime_s']:.0f} s, {fronts}"]
    models = stats.get("models", ())
    if len(models) > 1:
        lines += [
            f"  {one['name']}: {one['status']}, {one['running']} running, {one['waiting']} waiting" for one in models
        ]
    if "running" not in now:
        return [*lines, "The engine has reported nothing yet."]
    device = now["kv_blocks"]["device"]
    lines += [
        f"requests   {now['running']} running, {now['waiting']} waiting, {_last(series['requests_per_s']):.2f} ended/s",
        (
            f"tokens/s   {_last(series['input_tokens_per_s']):.1f} in,"
            f" {_last(series['cached_tokens_per_s']):.1f} cached, {_last(series['output_tokens_per_s']):.1f} out"
        ),
        f"KV blocks  {device['used']} used, {device['cached']} cached, {device['free']} free of {device['total']}",
        "steps      " + _steps(series),
        "errors/s   " + f"{_last(series['errors_per_s']):.2f} errors, {_last(series['refused_per_s']):.2f} refused",
        f"last {stats['window_s']} s".ljust(10) + f"{'n':>8}{'p50 ms':>10}{'p95 ms':>10}{'p99 ms':>10}",
    ]
    for name in ("ttft", "itl", "tpot", "queue", "e2e"):
        found = stats["latency"][f"{name}_s"]
        cells = "".join(_milliseconds(found[percent]) for percent in ("p50", "p95", "p99"))
        lines.append(f"{name:<10}{found['n']:>8.0f}{cells}")
    for one in stats["slos"]:
        lines.append(f"{'met' if one['is_met'] else 'MISSED'}  {one['slo']}, budget left {one['budget_left']:.0%}")
    lines += [
        f"{one['id'][:40]:<42}{one['running_s']:>8.1f} s {one['prompt_tokens']:>7} in {one['output_tokens']:>6} out"
        for one in running[:12]
    ]
    return lines


def _steps(series: dict[str, Any]) -> str:
    parts = ", ".join(f"{name} {_last(values):.2f}" for name, values in series["step_ms"].items())
    return f"{_last(series['steps_per_s']):.1f}/s, {_last(series['rows_per_step']):.1f} rows; ms: {parts}"


def _last(values: list[float | None]) -> float:
    """The last known value of the last half minute."""
    return next((value for value in reversed(values[-6:]) if value is not None), 0.0)


def _milliseconds(value: float | None) -> str:
    return f"{1e3 * value:>10.1f}" if value is not None else f"{'-':>10}"
