"""`millrace trace`: draws the timeline of one request, or of the engine's last steps, and writes a Perfetto file."""

from __future__ import annotations

import argparse
import json
import shutil
import urllib.parse
from dataclasses import replace
from pathlib import Path
from typing import Any

from millrace.observe.perfetto import Slice, bars
from millrace.terminal.parser import UsageError
from millrace.terminal.server_options import add_server, ask_server

USAGE = "millrace trace REQUEST | --steps N [--out FILE] [--url URL]"
EXAMPLES = """\
A request's id is its header X-Request-Id or the 'id' of its answer. Open the file at https://ui.perfetto.dev.

examples:
  millrace trace chatcmpl-123 --out request.json    one request, in the terminal and as a file
  millrace trace --steps 500 --out steps.json       the engine's last 500 steps"""

MAX_DRAWN = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("request", nargs="?", metavar="REQUEST", help="id of a request")
    parser.add_argument("--steps", type=int, metavar="N", help="the engine's last N steps (at most 4096)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write a file for Perfetto")
    parser.add_argument("--json", action="store_true", help="print the server's answer")
    add_server(parser)


def run(args: argparse.Namespace) -> int:
    from millrace.observe.perfetto import request_slices, step_slices, trace_file

    if (args.request is None) == (args.steps is None):
        raise UsageError("Give the id of a request, or --steps N.")
    if args.request is not None:
        name = urllib.parse.quote(args.request, safe="")
        found = ask_server(args, f"/v1/requests/{name}/explain")
        slices = request_slices(found)
    else:
        found = ask_server(args, "/v1/steps", last=args.steps)
        slices = step_slices(found)
    if args.out:
        args.out.write_text(json.dumps(trace_file(slices, "millrace")), encoding="utf-8")
    if args.json:
        print(json.dumps(found))
        return 0
    print("\n".join(_drawing(found, slices)))
    if args.out:
        print(f"Wrote {args.out}; open it at https://ui.perfetto.dev.")
    return 0


def _drawing(found: dict[str, Any], slices: list[Slice]) -> list[str]:
    width = max(20, min(60, shutil.get_terminal_size().columns - 34))
    if "step_no" not in found:
        return [f"{found['id']}: {found['state']}, priority {found['priority']}", *bars(slices, width)]
    if not slices:
        return ["The engine has run no steps yet."]
    drawn = slices[-MAX_DRAWN:]
    lines = [f"The last {len(drawn)} of {len(slices)} steps of {found['model']}:"] if len(drawn) < len(slices) else []
    return [*lines, *bars([replace(one, start_s=one.start_s - drawn[0].start_s) for one in drawn], width)]
