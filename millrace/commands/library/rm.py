"""`millrace rm`: deletes downloaded models."""

from __future__ import annotations

import argparse

from millrace.sources.library import remove

USAGE = "millrace rm MODEL …"
EXAMPLES = """\
examples:
  millrace rm gemma-3-270m
  millrace rm org/model-GGUF:Q4_K_M"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="+", metavar="MODEL", help="name as `millrace ls` shows it")


def run(args: argparse.Namespace) -> int:
    for name in args.models:
        removed, freed = remove(name)
        print(f"Deleted {removed}: {freed / 1e6:,.0f} MB are free again.", flush=True)
    return 0
