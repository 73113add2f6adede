"""`millrace fetch`: brings a model onto this machine and shows how far it has come."""

from __future__ import annotations

import argparse

from millrace.config import DEFAULT_MODEL
from millrace.sources.known_models import KNOWN_MODELS
from millrace.sources.resolve import resolve_model
from millrace.terminal.model_download import fetch_shown, is_here
from millrace.terminal.parser import UsageError

USAGE = "millrace fetch [MODEL …] [--all]"
EXAMPLES = """\
examples:
  millrace fetch                        the default model
  millrace fetch qwen2.5-coder-1.5b     one known by name (millrace models lists them)
  millrace fetch org/name               one of the Hugging Face hub
  millrace fetch --all                  every model known by name (about 2 GB)"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", help=f"a known name or a hub id (default: {DEFAULT_MODEL})"
    )
    parser.add_argument("--all", action="store_true", help="every model known by name")


def run(args: argparse.Namespace) -> int:
    if args.all and args.models:
        raise UsageError("--all means every known model; leave out the names.")
    for source in [model.name for model in KNOWN_MODELS] if args.all else args.models or [DEFAULT_MODEL]:
        files = resolve_model(source) if is_here(source) else fetch_shown(source)
        print(f"{files.name} is in {files.path}", flush=True)
    return 0
