"""`millrace stop`: stops a server on this machine; its running requests may finish first."""

from __future__ import annotations

import argparse
import json
import os
import signal
import time

from millrace.errors import NotFound
from millrace.terminal.running_servers import RunningServer, choose_server, running_servers

USAGE = "millrace stop [MODEL or PID] [--all]"
EXAMPLES = """\
examples:
  millrace stop                   the only server
  millrace stop qwen3-8b          the server that runs this model
  millrace stop --all"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "which", nargs="?", default="", metavar="MODEL", help="model or process id, as `millrace ps` shows"
    )
    parser.add_argument("--json", action="store_true", help="one JSON line per server")
    parser.add_argument("--all", action="store_true", help="stop every server of yours")
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="S", help="seconds to wait for the end (default: 60)"
    )


def run(args: argparse.Namespace) -> int:
    chosen = running_servers() if args.all else [choose_server(args.which)]
    for server in chosen:
        os.kill(server.pid, signal.SIGTERM)
    deadline = time.monotonic() + args.timeout
    for server in chosen:
        _wait(server, deadline)
        said = f"Stopped {server.model} (process {server.pid})."
        print(json.dumps({"model": server.model, "pid": server.pid}) if args.json else said, flush=True)
    return 0


def _wait(server: RunningServer, deadline: float) -> None:
    while server in running_servers():
        if time.monotonic() > deadline:
            raise NotFound(
                f"Process {server.pid} is still finishing requests. Wait, or end it at once with: kill -9 {server.pid}"
            )
        time.sleep(0.1)
