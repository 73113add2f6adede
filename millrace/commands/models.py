"""`millrace models`: lists the models known by name and which of them are downloaded."""

from __future__ import annotations

import argparse
import json

from millrace.config import cache_dir
from millrace.sources.known_models import KNOWN_MODELS
from millrace.terminal.model_download import is_cached

USAGE = "millrace models [--json]"
EXAMPLES = """\
These models have short names. Any Hugging Face directory, .gguf file or Hugging Face id can be served too.

examples:
  millrace models
  millrace fetch qwen2.5-coder-1.5b"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON line per model")


def run(args: argparse.Namespace) -> int:
    if args.json:
        for model in KNOWN_MODELS:
            record = {"name": model.name, "title": model.title, "bytes": model.num_bytes, "cached": is_cached(model)}
            print(json.dumps(record))
        return 0
    rows = [("name", "model", "size", "downloaded", "aliases")]
    rows += [
        (m.name, m.title, f"{m.num_bytes / 1e6:,.0f} MB", "yes" if is_cached(m) else "no", ", ".join(m.aliases))
        for m in KNOWN_MODELS
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print(f"\nModels are stored in {cache_dir() / 'models'}.")
    return 0
