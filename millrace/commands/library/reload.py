"""`millrace reload`: shows what a changed settings file changes in a running server, and makes the server read it."""

from __future__ import annotations

import argparse
import json
import os
import signal

from millrace.config import adopt_environment
from millrace.settings_changes import server_changes
from millrace.supervise.reload import as_started
from millrace.terminal.running_servers import choose_server

USAGE = "millrace reload [MODEL or PID] [--dry-run]"
EXAMPLES = """\
A server reads its settings file and variables again; the options of its command line still win. Requests go on.
Without --dry-run, settings that can change live are changed, and the rest is listed as needing a restart.

examples:
  millrace reload --dry-run       what would change, and when
  millrace reload                 change it (the same as: kill -HUP PID)"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("which", nargs="?", default="", metavar="MODEL", help="model or process id, see `millrace ps`")
    parser.add_argument("--dry-run", action="store_true", help="only show what would change")
    parser.add_argument("--json", action="store_true", help="one JSON line per change")


def run(args: argparse.Namespace) -> int:
    server = choose_server(args.which)
    adopt_environment(server.pid)
    running = server.running_settings()
    found = server_changes(running, as_started(server.read_settings(), running))
    for change in found:
        record = {"key": change.shown_key, "before": change.before, "after": change.after, "live": change.is_live}
        print(json.dumps(record) if args.json else str(change))
    if not found and not args.json:
        print("Nothing changed.")
    if not args.dry_run and any(change.is_live for change in found):
        os.kill(server.pid, signal.SIGHUP)
    return 0
