"""`millrace profile`: where the time of a server's steps goes, and a roofline of their operating points."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from millrace.errors import MillraceError
from millrace.terminal.folding import folded
from millrace.terminal.server_options import add_server, ask_server
from millrace.terminal.status_line import StatusLine

USAGE = "millrace profile [--steps N] [--out FILE.html] [--url URL]"
EXAMPLES = """\
Waits until N more steps have run, so send requests meanwhile (`millrace load`).

examples:
  millrace profile --steps 300                     where the time of 300 steps went
  millrace profile --steps 300 --out profile.html  with a roofline plot"""

POLL_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="steps to measure (default: 200)")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="X", help="seconds to wait (default: 60)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write a page with the roofline")
    parser.add_argument("--json", action="store_true", help="print the server's answer")
    add_server(parser)


def run(args: argparse.Namespace) -> int:
    from millrace.load.roofline import machine_limits, page, report

    steps = _measured(args)
    stats = ask_server(args, "/v1/stats", window=60, step=5)
    limits = machine_limits(steps)
    if args.out:
        args.out.write_text(page(steps, limits), encoding="utf-8")
    if args.json:
        print(json.dumps(steps))
        return 0
    print(folded("\n".join(report(steps, stats, limits))))
    if args.out:
        print(f"Wrote {args.out}.")
    return 0


def _measured(args: argparse.Namespace) -> dict[str, Any]:
    """The server's answer when the steps have run, or time is up."""
    steps: dict[str, Any] = ask_server(args, "/v1/steps", last=1)
    first = steps["num_steps"]
    deadline = time.monotonic() + args.timeout
    with StatusLine() as line:
        while (num_run := steps["num_steps"] - first) < args.steps and time.monotonic() < deadline:
            line.show(f"Waiting for {args.steps} steps", num_run, args.steps)
            time.sleep(POLL_S)
            steps = ask_server(args, "/v1/steps", last=min(4096, args.steps))
    if not steps["step_no"] or num_run == 0:
        raise MillraceError(f"No step ran within {args.timeout:g} s; send requests while profiling.")
    return steps
