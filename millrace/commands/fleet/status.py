"""`millrace status`: how the members of a running fleet are."""

from __future__ import annotations

import argparse
import json
import time
import urllib.request
from pathlib import Path
from typing import Any

USAGE = "millrace status FILE [--json]"
EXAMPLES = """\
examples:
  millrace status fleet.toml         each member: state, process, restarts, load
  millrace status fleet.toml --json  one JSON line per member"""
ASK_TIMEOUT_S = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", type=Path, help="the fleet's file")
    parser.add_argument("--json", action="store_true", help="one JSON line per member")


def run(args: argparse.Namespace) -> int:
    import msgspec

    from millrace.fleet.settings import read_fleet_file
    from millrace.fleet.state_files import StateFiles
    from millrace.terminal.table import print_table

    state = StateFiles(read_fleet_file(args.file).directory).read()
    members = [msgspec.to_builtins(member) | {"load": _load(member.url)} for member in state.members]
    if args.json:
        for member in members:
            print(json.dumps(member))
        return 0
    head = ("member", "state", "for", "process", "restarts", "running", "waiting", "address")
    print_table([head, *map(_row, members)])
    for member in members:
        if member["reason"]:
            print(f"{member['name']} was last restarted because {member['reason']}.")
    if state.is_rolling:
        print("A rolling restart is under way.")
    return 0


def _row(member: dict[str, Any]) -> tuple[str, ...]:
    load = member["load"] or {}
    shown = (str(load.get(name, "")) for name in ("running", "waiting"))
    age = f"{max(0.0, time.time() - member['since']):.0f} s"
    process, restarts = str(member["pid"] or ""), str(member["restarts"])
    return (member["name"], member["state"], age, process, restarts, *shown, member["url"])


def _load(url: str) -> dict[str, Any] | None:
    try:
        with urllib.request.urlopen(f"{url}/v1/load", timeout=ASK_TIMEOUT_S) as answer:
            found = json.loads(answer.read())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
