"""`millrace explain`: why a request took as long as it did."""

from __future__ import annotations

import argparse
import json
import urllib.parse
from typing import Any

from millrace.terminal.server_options import add_server, ask_server

USAGE = "millrace explain REQUEST [--url URL] [--json]"
EXAMPLES = """\
examples:
  millrace explain chatcmpl-123          by the 'id' of the answer
  millrace explain my-request --json     by the header X-Request-Id, as JSON"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("request", metavar="REQUEST", help="id of a request")
    parser.add_argument("--json", action="store_true", help="print the server's answer")
    add_server(parser, with_model=False)


def run(args: argparse.Namespace) -> int:
    name = urllib.parse.quote(args.request, safe="")
    found = ask_server(args, f"/v1/requests/{name}/explain")
    if args.json:
        print(json.dumps(found))
        return 0
    print(f"{found['id']} (X-Request-Id {found['request_id']}): {found['state']}, priority {found['priority']}")
    for number, sequence in enumerate(found["sequences"]):
        print("\n".join(_lines(number, sequence)))
    return 0


def _lines(number: int, sequence: dict[str, Any]) -> list[str]:
    stages = sequence["stages_s"]
    parts = ", ".join(f"{name} {1e3 * seconds:.1f} ms" for name, seconds in stages.items() if name != "total")
    lines = [
        (
            f"sequence {number}: {sequence['finish_reason'] or 'not ended'}, {sequence['prompt_tokens']} prompt tokens,"
            f" {sequence['output_tokens'] if sequence['output_tokens'] is not None else '?'} output tokens,"
            f" {1e3 * stages['total']:.1f} ms"
        ),
        f"  time: {parts}",
        f"  queue: {sequence['queue']['why']}",
        f"  cache: {sequence['cache']['why']}",
    ]
    lines += [f"  preempted {reason}" for reason in sequence["preemptions"]["reasons"]]
    if sequence["resumed"]["why"]:
        lines.append(f"  engine: {sequence['resumed']['why']}")
    if sequence["message"]:
        lines.append(f"  error: {sequence['message']}")
    return lines
