"""`millrace canary`: gives a share of an adapter's requests to a new version, promotes it, or takes it back."""

from __future__ import annotations

import argparse
import json
from typing import Any
from urllib.parse import quote

from millrace.terminal.parser import UsageError
from millrace.terminal.server_options import add_server, send_to_server

USAGE = "millrace canary NAME (--path DIR [--share X] | --promote | --abort) [options]"
EXAMPLES = """\
The server takes the new version back by itself when its requests fail, or are slow, more than those of the old one.
`GET /v1/adapters/NAME` shows how both do.

examples:
  millrace canary pirate --path /srv/adapters/pirate-2 --share 0.1   every tenth request gets the new version
  millrace canary pirate --promote                                   all requests get it
  millrace canary pirate --abort                                     none gets it any more"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="of the adapter")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--path", metavar="DIR", help="directory of the new version on the server, or org/repo")
    what.add_argument("--promote", action="store_true", help="give all requests to the new version")
    what.add_argument("--abort", action="store_true", help="take the new version back")
    parser.add_argument("--share", type=float, metavar="X", help="of the adapter's requests; default: 0.1")
    parser.add_argument(
        "--max-failed",
        type=float,
        metavar="X",
        help="share of failed requests above the old version's; default: 0.05",
    )
    parser.add_argument("--max-slowdown", type=float, metavar="X", help="times the old time of a token; default: 1.5")
    parser.add_argument("--json", action="store_true", help="print the server's answer")
    add_server(parser, with_model=False)


def run(args: argparse.Namespace) -> int:
    given = {"share": args.share, "max_failed": args.max_failed, "max_slowdown": args.max_slowdown}
    settings = {name: value for name, value in given.items() if value is not None}
    if settings and not args.path:
        raise UsageError(f"--{next(iter(settings)).replace('_', '-')} goes with --path.")
    where = f"/v1/adapters/{quote(args.name, safe='')}/canary"
    if args.path:
        answer = send_to_server(args, "POST", where, {"path": args.path, **settings})
    elif args.promote:
        answer = send_to_server(args, "POST", f"{where}/promote")
    else:
        answer = send_to_server(args, "DELETE", where)
    print(json.dumps(answer) if args.json else _sentence(args, answer))
    return 0


def _sentence(args: argparse.Namespace, answer: dict[str, Any]) -> str:
    if args.promote:
        return f"All requests for {args.name} get the new version, {answer['path']}."
    if args.abort:
        return f"All requests for {args.name} get the old version, {answer['path']}."
    return f"A share of {answer['canary']['share']:g} of the requests for {args.name} gets {answer['canary']['path']}."
