"""`millrace fetch`: downloads models, with progress."""

from __future__ import annotations

import argparse

from millrace.config import DEFAULT_MODEL
from millrace.sources.known_models import KNOWN_MODELS
from millrace.sources.resolve import resolve_model
from millrace.terminal.model_download import download_model, is_downloaded
from millrace.terminal.parser import UsageError

USAGE = "millrace fetch [MODEL …] [--all]"
EXAMPLES = """\
examples:
  millrace fetch                        the default model
  millrace fetch qwen2.5-coder-1.5b     a model known by name (see millrace models)
  millrace fetch org/name               a model on the Hugging Face Hub
  millrace fetch --all                  all models known by name (about 2 GB)"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", help=f"known name or Hugging Face id (default: {DEFAULT_MODEL})"
    )
    parser.add_argument("--all", action="store_true", help="download all models known by name")


def run(args: argparse.Namespace) -> int:
    if args.all and args.models:
        raise UsageError("Give either --all or model names, not both.")
    for source in [model.name for model in KNOWN_MODELS] if args.all else args.models or [DEFAULT_MODEL]:
        files = resolve_model(source) if is_downloaded(source) else download_model(source)
        print(f"{files.name} is in {files.path}", flush=True)
    return 0
