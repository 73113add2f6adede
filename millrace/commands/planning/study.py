"""`millrace study`: answers a question about serving as a page with a table, a plot and a conclusion. Most studies are
simulated; those about the engine itself and its answers are measured on this machine."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.commands.planning.simulate import add_machine, machine_of
from millrace.terminal.parser import UsageError

if TYPE_CHECKING:
    from millrace.simulate.studies.findings import Findings

USAGE = "millrace study [NAME] [--profile PROFILE] [--out DIRECTORY]"
EXAMPLES = """\
examples:
  millrace study                                          list the studies
  millrace study chunk-size --profile h200-8b             print the page
  millrace study all --profile mine.json --out studies    write the pages and plots of all simulated studies
  millrace study w4a8 --samples 5 --minutes 30            measured on this machine
  millrace study needle-recall --model smollm2,./mine     two models beside each other
  millrace study thinking-length --data gsm8k.jsonl --model qwen2.5-coder-1.5b"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", nargs="?", default="", metavar="NAME", help="a study, or all simulated ones (all); none lists them"
    )
    add_machine(parser)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed (default: 0)")
    parser.add_argument("--out", type=Path, metavar="DIRECTORY", help="write NAME.md and NAME.svg here")
    measured = parser.add_argument_group("studies that measure this machine (they also take --model)")
    measured.add_argument("--samples", type=int, default=0, metavar="N", help="how many (default: by study)")
    measured.add_argument(
        "--minutes", type=float, metavar="X", help="measure no further rounds or lengths after this time (default: 10)"
    )
    measured.add_argument("--data", type=Path, metavar="FILE", help="what the study reads, if it needs a file")


def run(args: argparse.Namespace) -> int:
    from millrace.bench.studies.registry import MEASURED
    from millrace.simulate.studies.scheduling import STUDIES

    if not args.name:
        for name, study in STUDIES.items():
            print(f"{name:<18}simulated  {study.question}")
        for name, measured in MEASURED.items():
            print(f"{name:<18}measured   {measured.question}")
        return 0
    if args.name in MEASURED:
        return _measure(args)
    if args.name != "all" and args.name not in STUDIES:
        raise UsageError(f"There is no study {args.name!r}. Studies: {', '.join((*STUDIES, *MEASURED))}, all.")
    return _simulate(args)


def _simulate(args: argparse.Namespace) -> int:
    from millrace.simulate.studies.findings import page
    from millrace.simulate.studies.scheduling import STUDIES

    if args.samples or args.data or args.minutes is not None:
        raise UsageError(
            "--samples, --minutes and --data are for studies that measure; `millrace study` lists which do."
        )
    profile = machine_of(args)
    source = args.profile or f"{args.device} {args.model}"
    where = f"{profile.model} on {profile.device} ({profile.source}, error {100 * profile.error:.0f}% of a step)"
    for name in STUDIES if args.name == "all" else (args.name,):
        began = time.monotonic()
        found = STUDIES[name].run(profile, args.seed)
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
        origin = f"`millrace study {name} --profile {source} --seed {args.seed}`. Simulated: {where}."
        _show(args, name, page(name, STUDIES[name], found, origin), found)
    return 0


def _measure(args: argparse.Namespace) -> int:
    from millrace.bench.studies.measured import MINUTES, Asked, where
    from millrace.bench.studies.registry import MEASURED
    from millrace.simulate.studies.findings import page

    if args.profile or args.device or args.memory:
        raise UsageError(f"{args.name} is measured on this machine: leave --profile, --device and --memory out.")
    if args.samples < 0:
        raise UsageError(f"--samples is {args.samples}; it must be at least 1, or 0 for the study's own number.")
    study, load = MEASURED[args.name], os.getloadavg()[0]
    if args.minutes is not None and not study.has_limit:
        limited = ", ".join(name for name, one in MEASURED.items() if one.has_limit)
        raise UsageError(f"{args.name} has no time limit: leave --minutes out. Studies that have one: {limited}.")
    minutes = MINUTES if args.minutes is None else args.minutes
    if not minutes > 0:
        raise UsageError(f"--minutes is {minutes:g}; it must be more than 0.")
    asked = Asked(args.model or study.model, args.samples or study.samples, args.seed, args.data, minutes)
    found = study.run(asked)
    data = "" if asked.data is None else f" --data {asked.data.name}"
    limit = f" --minutes {minutes:g}" if study.has_limit else ""
    told = f"--model {asked.model} --samples {asked.samples}{limit}{data} --seed {args.seed}"
    command = f"`millrace study {args.name} {told}`"
    _show(args, args.name, page(args.name, study, found, f"{command}. Measured: {where(load)}."), found)
    return 0


def _show(args: argparse.Namespace, name: str, text: str, found: Findings) -> None:
    from millrace.load.svg import svg_file

    if args.out is None:
        print(text)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{name}.md").write_text(text, encoding="utf-8")
    for at, drawn in enumerate(found.plots):
        (args.out / f"{name}{'' if at == 0 else f'-{at + 1}'}.svg").write_text(svg_file(drawn), encoding="utf-8")
