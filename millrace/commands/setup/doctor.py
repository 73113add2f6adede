"""`millrace doctor`: looks for what keeps this machine from serving, explains it and offers the fix."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from dataclasses import asdict

from millrace.terminal.colour import DIM, RED, coloured
from millrace.terminal.folding import terminal_width
from millrace.terminal.settings_options import add_model, add_settings, load_settings

USAGE = "millrace doctor [MODEL] [options] [--json]"
EXAMPLES = """\
Takes the options of `millrace serve`, so that it checks the port, files and model of your command.
The exit code is 1 if there is a problem, else 0.

examples:
  millrace doctor
  millrace doctor ./my-model --port 8123 --json"""

_MARKS = {"ok": "ok", "warning": "warning", "problem": "PROBLEM"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--json", action="store_true", help="one JSON line per finding")
    add_settings(parser, shown=("model.source", "server.host", "server.port", "run.device", "run.threads"))


def _hanging(line: str) -> str:
    """Folded to the terminal, below the text of a finding."""
    width = terminal_width()
    if width is None or len(line) <= width:
        return line
    return textwrap.fill(
        line, width, subsequent_indent=" " * 21, drop_whitespace=True, break_long_words=False, break_on_hyphens=False
    )


def run(args: argparse.Namespace) -> int:
    from millrace.commands.setup.checks import run_checks

    has_problem = False
    for finding in run_checks(load_settings(args).config):
        has_problem |= finding.status == "problem"
        if args.json:
            print(json.dumps(asdict(finding)), flush=True)
            continue
        line = _hanging(f"{_MARKS[finding.status]:<8} {finding.subject:<11} {finding.text}")
        print(coloured(line, RED, sys.stdout) if finding.status != "ok" else line, flush=True)
        if finding.fix:
            print(coloured(_hanging(f"{'':<20} → {finding.fix}"), DIM, sys.stdout), flush=True)
    return 1 if has_problem else 0
