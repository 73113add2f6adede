"""`millrace replay`: a page about a step log, and the same requests under other settings."""

from __future__ import annotations

import argparse
from pathlib import Path

from millrace.commands.planning.simulate import add_machine, machine_of

USAGE = "millrace replay STEPLOG --profile PROFILE [--what-if SETTINGS] [--html FILE]"
EXAMPLES = """\
A step log (`millrace serve --step-log FILE`) has no times: steps take what the profile says, and requests count as
arrived when they were first admitted. `millrace bench replay` runs the same steps again on the real engine.

examples:
  millrace replay steps.log --profile mine.json --late-ms 500 --html incident.html
  millrace replay steps.log --profile mine.json --what-if policy=shortest --what-if mixed_budget=512"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", type=Path, metavar="STEPLOG", help="file of --step-log")
    add_machine(parser)
    parser.add_argument("--late-ms", type=float, default=1000.0, metavar="X", help="explain later first tokens")
    parser.add_argument("--what-if", action="append", default=[], metavar="SETTINGS", help="simulated; repeat")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with a timeline")


def run(args: argparse.Namespace) -> int:
    from millrace.simulate import report
    from millrace.simulate.replay import plots, replay, table
    from millrace.simulate.settings import SimulationSettings
    from millrace.simulate.simulation import simulate

    profile = machine_of(args)
    found = replay(args.log, profile)
    setup = found.setup
    logged = (
        f"max_running={setup.max_rows},token_budget={setup.token_budget},block_size={setup.block_size},"
        f"kv_tokens={setup.num_blocks * setup.block_size}"
    )
    text, drawn = table(found, args.late_ms / 1e3), plots(found)
    if args.what_if:
        base, requests = SimulationSettings().changed(logged), found.workload()
        asked = [("as logged", base), *((what, base.changed(what)) for what in args.what_if)]
        variants = [report.Variant(name, made, simulate(requests, profile, made)) for name, made in asked]
        text = "\n\n".join([text, report.table(variants)])
        drawn += report.plots(variants)
    print(text)
    if args.html:
        args.html.write_text(report.html_page("Replay of a step log", text, drawn), encoding="utf-8")
    return 0
