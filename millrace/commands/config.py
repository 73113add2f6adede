"""`millrace config`: every setting with its value and where the value came from, as a table or as TOML."""

from __future__ import annotations

import argparse
import shutil
import sys

from millrace.terminal.settings_options import add_model, add_settings, load_settings
from millrace.terminal.settings_table import table_lines, toml_lines

USAGE = "millrace config [MODEL] [options] [--toml]"
EXAMPLES = """\
examples:
  millrace config                                 every setting at its default
  millrace config --config my.toml --port 9000    a file, overridden by an option
  millrace config --toml > my.toml                a file to start from"""


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
    """Terminal columns to wrap help texts to; None (no wrapping) if the output is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
