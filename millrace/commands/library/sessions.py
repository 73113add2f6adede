"""`millrace sessions`: conversations that a running server keeps with their keys and values."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from millrace.terminal.parser import UsageError
from millrace.terminal.server_options import add_server, ask_server, download, send_to_server, upload
from millrace.terminal.table import print_table

USAGE = "millrace sessions {new,ls,show,fork,renew,rm,export,import} [ID] [options]"
EXAMPLES = """\
A session is a conversation of which each turn computes only what is new.

examples:
  millrace sessions new boats --ttl-s 3600
  millrace sessions ls
  millrace sessions show boats
  millrace sessions fork boats sails
  millrace sessions renew boats --ttl-s 7200
  millrace sessions export boats --file boats.kv      a signed file, for a replica of the same model
  millrace sessions rm boats
  millrace sessions import boats --file boats.kv"""
MAX_LISTED = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", metavar="WHAT", help="new, ls, show, fork, renew, rm, export or import")
    parser.add_argument("name", nargs="?", default="", metavar="ID", help="the session")
    parser.add_argument("new_name", nargs="?", default="", metavar="NEW", help="id of the fork; default: a new one")
    parser.add_argument("--file", type=Path, metavar="FILE", help="the signed file (export, import)")
    parser.add_argument("--ttl-s", type=float, metavar="X", help="seconds to live (new, renew, fork)")
    parser.add_argument("--json", action="store_true", help="print the server's answer")
    add_server(parser, with_model=False)


def run(args: argparse.Namespace) -> int:
    actions = {
        "new": _new,
        "ls": _list,
        "show": _show,
        "fork": _fork,
        "renew": _renew,
        "rm": _remove,
        "export": _export,
        "import": _import,
    }
    if args.what not in actions:
        raise UsageError(f"Unknown action '{args.what}'. Actions: {', '.join(actions)}.")
    if args.what != "ls" and not args.name:
        raise UsageError(f"`sessions {args.what}` needs the ID of a session.")
    actions[args.what](args)
    return 0


def _path(args: argparse.Namespace, action: str = "") -> str:
    return f"/v1/sessions/{quote(args.name, safe='')}{action}"


def _list(args: argparse.Namespace) -> None:
    found = ask_server(args, "/v1/sessions", limit=MAX_LISTED)
    if args.json:
        print(json.dumps(found))
        return
    header = ["id", "model", "turns", "tokens", "cached now", "MiB", "expires in"]
    print_table([header, *(_figures(one) for one in found["data"])], right=(2, 3, 4, 5, 6))
    if found["has_more"]:
        print(f"These are the newest {len(found['data'])}; there are more.")


def _figures(one: dict[str, Any]) -> list[str]:
    kv = one["kv"] or {"bytes": 0, "locations": {}}
    cached = ", ".join(f"{count:,} {place}" for place, count in kv["locations"].items() if count) or "0"
    expires = f"{max(0.0, one['expires_at'] - time.time()):.0f} s"
    counts = [f"{one['turns']:,}", f"{one['tokens']:,}"]
    return [one["id"], one["model"], *counts, cached, f"{kv['bytes'] / 2**20:.1f}", expires]


def _new(args: argparse.Namespace) -> None:
    _print(args, send_to_server(args, "POST", "/v1/sessions", {"id": args.name} | _ttl(args)))


def _ttl(args: argparse.Namespace) -> dict[str, float]:
    return {} if args.ttl_s is None else {"ttl_s": args.ttl_s}


def _show(args: argparse.Namespace) -> None:
    _print(args, ask_server(args, _path(args)))


def _fork(args: argparse.Namespace) -> None:
    body = ({"id": args.new_name} if args.new_name else {}) | _ttl(args)
    _print(args, send_to_server(args, "POST", _path(args, "/fork"), body))


def _renew(args: argparse.Namespace) -> None:
    _print(args, send_to_server(args, "POST", _path(args, "/renew"), _ttl(args)))


def _print(args: argparse.Namespace, one: dict[str, Any]) -> None:
    if args.json:
        print(json.dumps(one))
    else:
        for name, value in one.items():
            print(f"{name}: {value}")


def _remove(args: argparse.Namespace) -> None:
    gone = send_to_server(args, "DELETE", _path(args))
    print(json.dumps(gone) if args.json else f"{args.name} is ended.")


def _export(args: argparse.Namespace) -> None:
    target = args.file or Path(f"{args.name}.kv")
    size = download(args, _path(args, "/export"), target)
    print(json.dumps({"file": str(target), "bytes": size}) if args.json else f"{target}: {size / 2**20:.1f} MiB.")


def _import(args: argparse.Namespace) -> None:
    if args.file is None:
        raise UsageError("`sessions import` needs --file FILE with an exported session.")
    made = upload(args, f"/v1/sessions/import?{urlencode({'id': args.name})}", args.file)
    kept = made["kv"]["tokens"] if made["kv"] else 0
    print(json.dumps(made) if args.json else f"{made['id']}: {kept:,} tokens kept, none computed.")
