"""`millrace cache`: prompts that a running server keeps cached under a name."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

from millrace.terminal.parser import UsageError
from millrace.terminal.server_options import add_server, ask_server, send_to_server
from millrace.terminal.table import print_table

USAGE = "millrace cache {ls,show,warm,rm} [NAME] [options]"
EXAMPLES = """\
A prompt that begins with a kept one starts behind it. Memory for this: --kv-retained.

examples:
  millrace cache warm manual --file manual.txt --ttl-s 3600      compute a text and keep it for an hour
  millrace cache ls
  millrace cache show manual
  millrace cache rm manual"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", metavar="WHAT", help="ls, show, warm or rm")
    parser.add_argument("name", nargs="?", default="", metavar="NAME", help="name of the handle (show, warm, rm)")
    parser.add_argument("--file", type=Path, metavar="FILE", help="the text to keep cached (warm)")
    parser.add_argument("--ttl-s", type=float, default=300.0, metavar="X", help="seconds to keep it (default: 300)")
    parser.add_argument("--json", action="store_true", help="print the server's answer")
    add_server(parser)


def run(args: argparse.Namespace) -> int:
    actions = {"ls": _list, "show": _show, "warm": _warm, "rm": _remove}
    if args.what not in actions:
        raise UsageError(f"Unknown action '{args.what}'. Actions: ls, show, warm, rm.")
    if args.what != "ls" and not args.name:
        raise UsageError(f"`cache {args.what}` needs the NAME of a handle.")
    actions[args.what](args)
    return 0


def _list(args: argparse.Namespace) -> None:
    found = ask_server(args, "/v1/cache")
    if args.json:
        print(json.dumps(found))
        return
    header = ["name", "model", "tokens", "cached now", "MiB", "expires in"]
    print_table([header, *([one["id"], one["model"], *_figures(one)] for one in found["data"])], right=(2, 3, 4, 5))
    print(f"{found['used_bytes'] / 2**20:.1f} MiB kept, of {found['max_bytes'] / 2**20:.1f} MiB.")


def _show(args: argparse.Namespace) -> None:
    one = ask_server(args, f"/v1/cache/{quote(args.name, safe='')}")
    if args.json:
        print(json.dumps(one))
    else:
        for name, value in one.items():
            print(f"{name}: {value}")


def _figures(one: dict[str, Any]) -> list[str]:
    expires = f"{one['expires_in_s']:.0f} s"
    return [f"{one['tokens']:,}", f"{one['resident_tokens']:,}", f"{one['bytes'] / 2**20:.1f}", expires]


def _warm(args: argparse.Namespace) -> None:
    if args.file is None:
        raise UsageError("`cache warm` needs --file FILE with the text to keep cached.")
    try:
        text = args.file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{args.file} cannot be read: {error}.") from error
    body = {"prompt": text, "name": args.name, "ttl_s": args.ttl_s}
    made = send_to_server(args, "POST", "/v1/cache", body | ({"model": args.model} if args.model else {}))
    if args.json:
        print(json.dumps(made))
    else:
        computed, cached = made["created_tokens"], made["cached_tokens"]
        print(f"{made['id']}: {made['tokens']:,} tokens kept, {computed:,} computed, {cached:,} were cached before.")


def _remove(args: argparse.Namespace) -> None:
    path = f"/v1/cache/{quote(args.name, safe='')}"
    gone = send_to_server(args, "DELETE", path + (f"?model={quote(args.model)}" if args.model else ""))
    print(json.dumps(gone) if args.json else f"{args.name} is no longer kept.")
