"""`millrace study`: answers a question about serving by simulation, as a page with a table, a plot and a conclusion."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from millrace.commands.planning.simulate import add_machine, machine_of
from millrace.terminal.parser import UsageError

USAGE = "millrace study [NAME] --profile PROFILE [--out DIRECTORY]"
EXAMPLES = """\
examples:
  millrace study                                          list the studies
  millrace study chunk-size --profile h200-8b             print the page
  millrace study all --profile mine.json --out studies    write all pages and plots"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", default="", metavar="NAME", help="a study, or all; none lists them")
    add_machine(parser)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed (default: 0)")
    parser.add_argument("--out", type=Path, metavar="DIRECTORY", help="write NAME.md and NAME.svg here")


def run(args: argparse.Namespace) -> int:
    from millrace.load.svg import svg_file
    from millrace.simulate.studies.scheduling import STUDIES, page

    if not args.name:
        for name, study in STUDIES.items():
            print(f"{name:<18}{study.question}")
        return 0
    if args.name != "all" and args.name not in STUDIES:
        raise UsageError(f"There is no study {args.name!r}. Studies: {', '.join(STUDIES)}, all.")
    profile = machine_of(args)
    source = args.profile or f"{args.device} {args.model}"
    for name in STUDIES if args.name == "all" else (args.name,):
        began = time.monotonic()
        found = STUDIES[name].run(profile, args.seed)
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
        text = page(name, STUDIES[name], found, profile, source, args.seed)
        if args.out is None:
            print(text)
            continue
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / f"{name}.md").write_text(text, encoding="utf-8")
        for at, drawn in enumerate(found.plots):
            (args.out / f"{name}{'' if at == 0 else f'-{at + 1}'}.svg").write_text(svg_file(drawn), encoding="utf-8")
    return 0
