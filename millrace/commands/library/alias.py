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


def _absolute(source: str) -> str:
    """A path is kept whole, since the alias will be used in other directories."""
    path = Path(source).expanduser()
    return str(path.resolve()) if path.exists() and find_local(source) is None else source


def _needs_download(target: str) -> str:
    return "" if is_downloaded(target) else f" It is not downloaded: millrace pull {target}"


def run(args: argparse.Namespace) -> int:
    if args.name and (args.target or args.remove):
        if args.remove:
            write_alias(args.name, "")
            print(f"Removed the alias {args.name}.")
        else:
            check_source(args.target)
            target = _absolute(expand_alias(args.target))
            write_alias(args.name, target)
            print(f"{args.name} now stands for {target}." + _needs_download(target))
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
