"""`millrace trace`: draws the timeline of one request, or of the engine's last steps, and writes a Perfetto file."""

from __future__ import annotations

import argparse
import json
import urllib.parse
from pathlib import Path

from millrace.terminal.parser import UsageError

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
    parser.add_argument("--url", default="http://127.0.0.1:8000", metavar="URL", help="server")
    parser.add_argument("--api-key", default="", metavar="KEY", help="API key")


def run(args: argparse.Namespace) -> int:
    from millrace.load.server_answer import get_json
    from millrace.observe.perfetto import bars, request_slices, step_slices, trace_file

    if (args.request is None) == (args.steps is None):
        raise UsageError("Give the id of a request, or --steps N.")
    if args.request is not None:
        name = urllib.parse.quote(args.request, safe="")
        found = get_json(args.url, f"/v1/requests/{name}/explain", args.api_key)
        slices = request_slices(found)
        print(f"{found['id']}: {found['state']}, priority {found['priority']}")
    else:
        slices = step_slices(get_json(args.url, f"/v1/steps?last={args.steps}", args.api_key))
        if len(slices) > MAX_DRAWN:
            print(f"The last {MAX_DRAWN} of {len(slices)} steps:")
    drawn = slices[-MAX_DRAWN:] if args.steps else slices
    first = drawn[0].start_s if drawn and args.steps else 0.0
    from dataclasses import replace

    print("\n".join(bars([replace(one, start_s=one.start_s - first) for one in drawn])))
    if args.out:
        args.out.write_text(json.dumps(trace_file(slices, "millrace")), encoding="utf-8")
        print(f"Wrote {args.out}; open it at https://ui.perfetto.dev.")
    return 0
