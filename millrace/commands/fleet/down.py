"""`millrace down`: ends a fleet. The gateway goes first; running requests may finish."""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path

USAGE = "millrace down FILE"
EXAMPLES = """\
examples:
  millrace down fleet.toml"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", type=Path, help="the fleet's file")
    parser.add_argument("--timeout", type=float, default=180.0, metavar="S", help="seconds to wait (default: 180)")


def run(args: argparse.Namespace) -> int:
    from millrace.errors import NotFound
    from millrace.fleet.settings import read_fleet_file
    from millrace.fleet.state_files import StateFiles

    files = StateFiles(read_fleet_file(args.file).directory)
    state = files.read()
    os.kill(state.pid, signal.SIGTERM)
    deadline = time.monotonic() + args.timeout
    while files.is_running:
        if time.monotonic() > deadline:
            raise NotFound(f"The fleet (process {state.pid}) is still ending after {args.timeout:g} s.")
        time.sleep(0.1)
    print(f"Ended {len(state.members)} members.", flush=True)
    return 0
