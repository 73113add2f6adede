"""`millrace alias`: short names of your own for models."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from millrace.sources.library import find_local, is_downloaded
from millrace.sources.names import expand_alias, read_aliases, write_alias
from millrace.sources.resolve import check_source
from millrace.terminal.table import print_table

USAGE = "millrace alias [NAME [MODEL]] [--remove]"
EXAMPLES = """\
examples:
  millrace alias                          list the aliases
  millrace alias fast llama3.2-1b:q4_k_m  then: millrace run fast
  millrace alias fast --remove"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="the alias")
    parser.add_argument("target", nargs="?", metavar="MODEL", help="what it stands for: a name, path or hub name")
    parser.add_argument("--remove", action="store_true", help="remove the alias")
    parser.add_argument("--json", action="store_true", help="print the aliases as one JSON object")


def _change(name: str, target: str) -> str:
    """Set an alias, or remove it if there is no target. Returns what to say."""
    if not target:
        write_alias(name, "")
        return f"Removed the alias {name}."
    check_source(target)
    target = _absolute(expand_alias(target))
    write_alias(name, target)
    return f"{name} now stands for {target}." + _needs_download(target)


def _absolute(source: str) -> str:
    """A path is kept whole, since the alias will be used in other directories."""
    path = Path(source).expanduser()
    return str(path.resolve()) if path.exists() and find_local(source) is None else source


def _needs_download(target: str) -> str:
    return "" if is_downloaded(target) else f" It is not downloaded: millrace pull {target}"


def run(args: argparse.Namespace) -> int:
    if args.name and (args.target or args.remove):
        said = _change(args.name, "" if args.remove else args.target)
        print(json.dumps(read_aliases()) if args.json else said)
        return 0
    aliases = read_aliases()
    if args.name:
        aliases = {name: target for name, target in aliases.items() if name == args.name}
    if args.json:
        print(json.dumps(aliases))
    elif not aliases:
        print("No aliases. `millrace alias NAME MODEL` makes one.")
    else:
        print_table([("alias", "model"), *aliases.items()])
    return 0
