"""`millrace rm`: deletes downloaded models."""

from __future__ import annotations

import argparse
import json
import sys

from millrace.errors import ConfigError
from millrace.sources.library import remove
from millrace.terminal.running_servers import servers_of

USAGE = "millrace rm MODEL …"
EXAMPLES = """\
examples:
  millrace rm gemma-3-270m                asks if a server runs it
  millrace rm org/model-GGUF:Q4_K_M"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="+", metavar="MODEL", help="name as `millrace ls` shows it")
    parser.add_argument("-y", "--yes", action="store_true", help="delete a model even while it is being served")
    parser.add_argument("--json", action="store_true", help="one JSON line per model")


def _may_delete(name: str) -> bool:
    """Asks if a server runs the model; without a terminal the answer is no."""
    found = next(servers_of(name), None)
    if found is None:
        return True
    said = f"{name} is being served on {found[0].url} (process {found[0].pid})."
    if not sys.stdin.isatty():
        raise ConfigError(f"{said} Stop the server first (millrace stop {found[0].pid}), or give --yes.")
    return input(f"{said} Delete it all the same? [y/N] ").strip().lower() in ("y", "yes")


def run(args: argparse.Namespace) -> int:
    for name in args.models:
        if not args.yes and not _may_delete(name):
            print(f"{name} was not deleted.", file=sys.stderr)
            return 1
        removed, freed = remove(name)
        said = f"Deleted {removed}: {freed / 1e6:,.0f} MB are free again."
        print(json.dumps({"name": removed, "bytes": freed}) if args.json else said, flush=True)
    return 0
