"""`millrace tune`: searches settings for a workload in the simulator, and writes them as a config file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from millrace.commands.planning.simulate import add_machine, add_workload, machine_of, workload_of
from millrace.terminal.parser import UsageError

USAGE = "millrace tune [TRACE] --profile PROFILE --slo TEXT [--out millrace.toml] [options]"
EXAMPLES = """\
examples:
  millrace tune azure-conv.csv --speed 8 --profile h200-8b --slo "ttft p95 < 500 ms" --slo "tpot p99 < 30 ms"
  millrace serve MODEL --config millrace.toml"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workload(parser)
    add_machine(parser)
    what = parser.add_argument_group("search")
    what.add_argument("--set", default="", metavar="SETTINGS", help="settings to start from, as NAME=VALUE,…")
    what.add_argument("--slo", action="append", default=[], metavar="TEXT", help='such as "ttft p95 < 500 ms"; repeat')
    what.add_argument("--out", type=Path, metavar="FILE", help="write the settings for `millrace serve --config`")


def run(args: argparse.Namespace) -> int:
    from millrace.observe.slo.objective import parse_objective
    from millrace.simulate.planning.tune import Trial, config_toml, tune
    from millrace.simulate.report import Variant, table
    from millrace.simulate.settings import SimulationSettings

    if not args.slo:
        raise UsageError('tune needs at least one --slo, such as "ttft p95 < 500 ms".')
    objectives = tuple(parse_objective(text) for text in args.slo)
    profile, requests, base = machine_of(args), workload_of(args), SimulationSettings().changed(args.set)

    def show(trial: Trial) -> None:
        print(f"{trial.score:.4f}  {trial.text or 'as given'}", file=sys.stderr)

    first, best = tune(requests, profile, base, objectives, seed=args.seed, on_trial=show)
    shown = [Variant("as given", base, first.result), Variant(best.text or "nothing is better", base, best.result)]
    print(table(shown))
    print("Simulated only: confirm it on the machine with `millrace load` before you rely on it.")
    if args.out:
        what = args.trace.name if args.trace is not None else f"{args.rate:g} requests/s"
        args.out.write_text(config_toml(best, first, what), encoding="utf-8")
    return 0
