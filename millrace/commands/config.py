"""`millrace config`: the whole tree of settings with the source of every value, as a table or as TOML."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
from collections.abc import Iterator

from millrace.config import Leaf, LoadedConfig, leaves
from millrace.terminal.settings_options import add_model, add_settings, load_settings

USAGE = "millrace config [MODEL] [options] [--toml]"
EXAMPLES = """\
examples:
  millrace config                                 every setting at its default
  millrace config --config my.toml --port 9000    what these two layers make of it
  millrace config --toml > my.toml                a file to start from"""

_SMALLEST_HELP_WIDTH = 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--toml", action="store_true", help="print a TOML file that --config accepts")
    add_settings(parser)


def run(args: argparse.Namespace) -> int:
    loaded = load_settings(args)
    lines = toml_lines(loaded) if args.toml else table_lines(loaded, _width())
    print("\n".join(lines))
    return 0


def _width() -> int | None:
    """Columns to fold the help text into, or None when the output is not a terminal and nothing need be folded."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def table_lines(loaded: LoadedConfig, width: int | None) -> Iterator[str]:
    rows = [(leaf.key, toml_value(_value(loaded, leaf)), loaded.sources[leaf.key], leaf.help) for leaf in _leaves()]
    header = ("key", "value", "source", "help")
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(3)]
    room = None if width is None else max(width - sum(widths) - 6, _SMALLEST_HELP_WIDTH)
    section = ""
    for row in (header, *rows):
        if section and row[0].partition(".")[0] != section:
            yield ""
        section = row[0].partition(".")[0]
        start = "  ".join(cell.ljust(size) for cell, size in zip(row[:3], widths, strict=True))
        folded = textwrap.wrap(row[3], room) if room else [row[3]]
        yield f"{start}  {folded[0]}"
        yield from (" " * (len(start) + 2) + rest for rest in folded[1:])


def toml_lines(loaded: LoadedConfig) -> Iterator[str]:
    section = ""
    for leaf in _leaves():
        if leaf.section != section:
            yield from ([""] if section else [])
            yield f"[{leaf.section}]"
            section = leaf.section
        yield f"{leaf.name} = {toml_value(_value(loaded, leaf))}  # {leaf.help}"


def toml_value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's, save that TOML wants DEL escaped too.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def _leaves() -> list[Leaf]:
    return list(leaves().values())


def _value(loaded: LoadedConfig, leaf: Leaf) -> object:
    return getattr(getattr(loaded.config, leaf.section), leaf.name)
