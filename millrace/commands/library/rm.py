"""`millrace rm`: deletes downloaded models."""

from __future__ import annotations

import argparse
import json

from millrace.sources.library import remove

USAGE = "millrace rm MODEL …"
EXAMPLES = """\
examples:
  millrace rm gemma-3-270m
  millrace rm org/model-GGUF:Q4_K_M"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="+", metavar="MODEL", help="name as `millrace ls` shows it")
    parser.add_argument("--json", action="store_true", help="one JSON line per model")


def run(args: argparse.Namespace) -> int:
    for name in args.models:
        removed, freed = remove(name)
        said = f"Deleted {removed}: {freed / 1e6:,.0f} MB are free again."
        print(json.dumps({"name": removed, "bytes": freed}) if args.json else said, flush=True)
    return 0
