"""`millrace up`: starts a fleet and keeps it running until it is told to end."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

USAGE = "millrace up FILE"
EXAMPLES = """\
examples:
  millrace up fleet.toml          start the fleet; Ctrl-C or `millrace down fleet.toml` ends it
  millrace up fleet.toml --check  say whether the file is right, and what would be started"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", type=Path, help="the fleet's file (see deploy/fleet.toml)")
    parser.add_argument("--check", action="store_true", help="only read the file and print the commands")


def run(args: argparse.Namespace) -> int:
    from millrace.fleet.run import FleetRun
    from millrace.fleet.settings import read_fleet_file
    from millrace.observe.logs import setup_logging

    file = read_fleet_file(args.file)
    fleet = FleetRun(file)
    if args.check:
        for member in fleet.members:
            print(f"{member.state.name}: {' '.join(member.command)}")
        return 0
    setup_logging("info")
    address = ":".join(map(str, file.gateway_address))
    where = f"the gateway answers on http://{address}" if file.gateway is not None else "there is no gateway"
    print(f"Starting {len(file.replicas)} replicas; logs and state are in {file.directory}.", flush=True)
    asyncio.run(fleet.run(lambda: print(f"The fleet is ready; {where}.", flush=True)))
    print("The fleet has ended.", flush=True)
    return 0
