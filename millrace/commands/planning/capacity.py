"""`millrace capacity`: the cheapest machines that meet objectives for a forecast load."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from millrace.commands.planning.simulate import add_workload, workload_of
from millrace.terminal.parser import UsageError

USAGE = "millrace capacity [TRACE] --prices FILE --slo TEXT [--out fleet.toml] [options]"
EXAMPLES = """\
The forecast is a trace, played faster or slower with --speed, or --rate. The price list has tables such as
  [[machine]]
  name = "H200"
  profile = "h200-8b"         # a file of `millrace calibrate`, or a shipped name
  dollars_per_hour = 4.0
  settings = "policy=shortest"

examples:
  millrace capacity azure-conv.csv --speed 20 --prices prices.toml --slo "ttft p95 < 500 ms"
  millrace capacity --rate 40 --prices prices.toml --slo "tpot p99 < 50 ms" --out fleet.toml --html plan.html"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workload(parser)
    what = parser.add_argument_group("plan")
    what.add_argument("--prices", type=Path, metavar="FILE", help="price list (TOML)")
    what.add_argument("--slo", action="append", default=[], metavar="TEXT", help='such as "ttft p95 < 500 ms"; repeat')
    what.add_argument("--out", type=Path, metavar="FILE", help="write the cheapest plan as fleet.toml")
    what.add_argument("--html", type=Path, metavar="FILE", help="write the table and a plot")


def run(args: argparse.Namespace) -> int:
    from millrace.observe.slo.objective import parse_objective
    from millrace.simulate.capacity import capacity_plot, fleet_toml, read_prices, size, table
    from millrace.simulate.report import html_page

    if args.prices is None or not args.slo:
        raise UsageError('capacity needs --prices FILE and at least one --slo, such as "ttft p95 < 500 ms".')
    objectives, machines = tuple(parse_objective(text) for text in args.slo), read_prices(args.prices)
    requests = workload_of(args)

    def show(text: str) -> None:
        print(text, file=sys.stderr)

    found = [size(machine, requests, objectives, seed=args.seed, on_try=show) for machine in machines]
    text = table(found)
    print(text)
    if args.html:
        args.html.write_text(html_page("Capacity", text, [capacity_plot(found)]), encoding="utf-8")
    best = min(found, key=lambda one: one.dollars_per_hour)
    if best.high is None:
        print("No machine of the list meets the objectives.")
        return 1
    print(f"The cheapest plan is {best.high} × {best.machine.name} for {best.dollars_per_hour:.2f} dollars per hour.")
    if args.out:
        args.out.write_text(fleet_toml(best, objectives), encoding="utf-8")
    return 0
