"""`millrace ps`: lists the servers on this machine and the models they run."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from typing import Any

from millrace.terminal.folding import folded
from millrace.terminal.running_servers import RunningServer, running_servers
from millrace.terminal.table import print_table

Tree = dict[str, dict[str, object]]
"""Settings by section and name."""

USAGE = "millrace ps [--json]"
EXAMPLES = """\
examples:
  millrace ps
  millrace ps --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON line per server")


def run(args: argparse.Namespace) -> int:
    servers = running_servers()
    if args.json:
        for server in servers:
            print(json.dumps(_record(server)))
        return 0
    if not servers:
        print(folded("No Millrace server of yours runs on this machine. `millrace serve MODEL` starts one."))
        return 0
    rows = [("pid", "model", "device", "since", "url")]
    rows += [(str(s.pid), s.model, s.device, _age(time.time() - s.since), s.url) for s in servers]
    print_table(rows, right=(0,))
    return 0


def _record(server: RunningServer) -> dict[str, Any]:
    """The server's settings, and of each model only those that differ from them."""
    own = {name: _differences(settings, server.settings) for name, settings in server.models.items()}
    return {**asdict(server), "models": own}


def _differences(settings: Tree, base: Tree) -> Tree:
    changed = {
        section: {name: value for name, value in values.items() if base.get(section, {}).get(name) != value}
        for section, values in settings.items()
    }
    return {section: values for section, values in changed.items() if values}


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
