"""`millrace capacity`: the cheapest machines that meet objectives for a forecast load."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.commands.planning.simulate import add_workload, workload_of
from millrace.terminal.parser import UsageError

if TYPE_CHECKING:
    from millrace.simulate.requests import SimulatedRequest

USAGE = "millrace capacity [TRACE] --prices FILE --slo TEXT [--out fleet.toml] [options]"
EXAMPLES = """\
The forecast is a trace, played faster or slower with --speed, or --rate. The price list has tables such as
  [[machine]]
  name = "H200"
  profile = "h200-8b"         # a file of `millrace calibrate`, or a shipped name
  dollars_per_hour = 4.0
  settings = "policy=shortest"
  spot_dollars_per_hour = 1.6 # optional: machines that may be taken away,
  spot_share = 0.5            # at most this share of the replicas,
  spot_lost = 0.1             # of which this share is away at a bad time
  [[api]]                     # optional: what others take for the same tokens
  name = "an API"
  dollars_per_million_prompt = 0.15
  dollars_per_million_output = 0.60

examples:
  millrace capacity azure-conv.csv --speed 20 --prices prices.toml --slo "ttft p95 < 500 ms"
  millrace capacity --rate 40 --prices prices.toml --slo "tpot p99 < 50 ms" --out fleet.toml --html plan.html"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workload(parser)
    what = parser.add_argument_group("plan")
    what.add_argument("--server", default="", metavar="URL", help="the load is that of this running server")
    what.add_argument(
        "--watch", type=float, default=60.0, metavar="X", help="seconds that its metrics are watched (default: 60)"
    )
    what.add_argument("--prices", type=Path, metavar="FILE", help="price list (TOML)")
    what.add_argument("--slo", action="append", default=[], metavar="TEXT", help='such as "ttft p95 < 500 ms"; repeat')
    what.add_argument("--out", type=Path, metavar="FILE", help="write the cheapest plan as fleet.toml")
    what.add_argument("--html", type=Path, metavar="FILE", help="write the table and a plot")


def run(args: argparse.Namespace) -> int:
    from millrace.observe.slo.objective import parse_objective
    from millrace.simulate.planning.capacity import api_table, capacity_plot, fleet_toml, read_prices, size, table
    from millrace.simulate.report import html_page

    if args.prices is None or not args.slo:
        raise UsageError('capacity needs --prices FILE and at least one --slo, such as "ttft p95 < 500 ms".')
    objectives, prices = tuple(parse_objective(text) for text in args.slo), read_prices(args.prices)
    requests = workload_of(args) if not args.server else _watched(args)

    def show(text: str) -> None:
        print(text, file=sys.stderr)

    found = [size(machine, requests, objectives, seed=args.seed, on_try=show) for machine in prices.machine]
    text = table(found)
    print(text)
    if args.html:
        args.html.write_text(html_page("Capacity", text, [capacity_plot(found)]), encoding="utf-8")
    best = min(found, key=lambda one: one.dollars_per_hour)
    if best.high is None:
        print("No machine of the list meets the objectives.")
        return 1
    print(f"The cheapest plan is {best.high} × {best.machine.name} for {best.dollars_per_hour:.2f} dollars per hour.")
    if best.bought is not None and best.bought.spot:
        print(f"Of these, with spares, {best.bought.on_demand} on demand and {best.bought.spot} spot machines.")
    if prices.api:
        print(api_table(best, prices.api, requests))
    if args.out:
        args.out.write_text(fleet_toml(best, objectives), encoding="utf-8")
    return 0


def _watched(args: argparse.Namespace) -> list[SimulatedRequest]:
    """The load of a running server, between two readings of its metrics."""
    from millrace.bench.metrics_page import scrape
    from millrace.simulate.planning.rightsize import workload_of_server

    if args.trace is not None or args.rate or args.watch <= 0:
        raise UsageError("--server takes the place of a trace and --rate; --watch must be above 0.")
    url = args.server.rstrip("/")
    try:
        before = scrape(url)
        time.sleep(args.watch)
        after = scrape(url)
    except OSError as error:
        raise UsageError(f"The metrics of {url} cannot be read: {error}.") from error
    found = workload_of_server(before, after, args.watch, simulated_s=args.seconds or 300.0, seed=args.seed)
    print(
        f"{found.rate:.2f} requests/s, prompts of {found.prefix_tokens} shared and about {found.prompt.first:.0f} own"
        f" tokens, answers of about {found.output.first:.0f}",
        file=sys.stderr,
    )
    return found.requests()
