"""`millrace restart`: a rolling restart of a fleet's replicas, with the options that the file has now."""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path

USAGE = "millrace restart FILE"
EXAMPLES = """\
examples:
  millrace restart fleet.toml  after a change of 'args' or an upgrade of Millrace"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", type=Path, help="the fleet's file")
    parser.add_argument("--timeout", type=float, default=3600.0, metavar="S", help="seconds to wait (default: 3600)")


def run(args: argparse.Namespace) -> int:
    from millrace.errors import NotFound
    from millrace.fleet.settings import read_fleet_file
    from millrace.fleet.state_files import StateFiles

    files = StateFiles(read_fleet_file(args.file).directory)
    state, asked = files.read(), time.time()
    os.kill(state.pid, signal.SIGHUP)
    deadline = time.monotonic() + args.timeout
    while (ended := files.last_event("rolled")) is None or ended < asked:
        if time.monotonic() > deadline:
            raise NotFound(f"The restart is still under way after {args.timeout:g} s; see `millrace status`.")
        files.read()  # Fails if the fleet has ended.
        time.sleep(0.2)
    replicas = [member.name for member in state.members if member.kind == "replica"]
    print(f"Restarted {', '.join(replicas)}.", flush=True)
    return 0
