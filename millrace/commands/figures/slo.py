"""`millrace slo`: shows how a server meets its objectives, and writes alert rules and a Grafana dashboard for them."""

from __future__ import annotations

import argparse
import json

from millrace.terminal.parser import UsageError
from millrace.terminal.server_options import add_server, ask_server

USAGE = "millrace slo {show,rules,dashboard} [--slos TEXT] [--url URL]"
EXAMPLES = """\
Objectives are set with `millrace serve --slos "ttft p95 < 500 ms; errors < 0.1%"`.

examples:
  millrace slo show                                             burn rates and budget of a running server
  millrace slo rules --slos "ttft p95 < 500 ms" > rules.yml     alert rules for Prometheus
  millrace slo dashboard --slos "ttft p95 < 500 ms" > d.json    dashboard for Grafana"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", metavar="WHAT", help="show, rules or dashboard")
    parser.add_argument("--slos", default="", metavar="TEXT", help="objectives, separated by ; (rules, dashboard)")
    parser.add_argument("--json", action="store_true", help="print the server's answer (show)")
    add_server(parser)


def run(args: argparse.Namespace) -> int:
    from millrace.observe.slo.objective import parse_objectives

    if args.what == "show":
        return _show(args)
    if args.what not in ("rules", "dashboard"):
        raise UsageError(f"Unknown subcommand '{args.what}'. It must be show, rules or dashboard.")
    objectives = parse_objectives(args.slos)
    if args.what == "rules":
        from millrace.observe.slo.rules import alert_rules

        print(alert_rules(objectives), end="")
    else:
        from millrace.observe.slo.dashboard import grafana_dashboard

        print(json.dumps(grafana_dashboard(objectives), indent=1))
    return 0


def _show(args: argparse.Namespace) -> int:
    slos = ask_server(args, "/v1/stats", window=60, step=10)["slos"]
    if args.json:
        print(json.dumps(slos))
    elif not slos:
        print('The server has no objectives; start it with --slos "ttft p95 < 500 ms".')
    for one in () if args.json else slos:
        burn = ", ".join(f"{window} {rate:.2f}" for window, rate in one["burn"].items())
        print(f"{one['slo']}: {'met' if one['is_met'] else 'MISSED'}, {one['good']} of {one['total']} within the limit")
        print(f"  error budget left {100 * one['budget_left']:.0f}% of 30 days")
        print(f"  burn rate {burn}")
        for use in one["used_by"]:
            print(f"  {use['beyond_limit']} of {use['of']} beyond it in one minute: {use['cause']}")
    return 0 if all(one["is_met"] for one in slos) else 1
