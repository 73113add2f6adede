"""`millrace ls`: lists the downloaded models."""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime

from millrace.sources.library import aliases_by_model, list_downloaded
from millrace.terminal.table import print_table

USAGE = "millrace ls [--json]"
EXAMPLES = """\
examples:
  millrace ls
  millrace ls --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON line per model")


def run(args: argparse.Namespace) -> int:
    models = list_downloaded()
    names = aliases_by_model()
    if args.json:
        for model in models:
            record = {"name": model.name, "bytes": model.num_bytes, "path": str(model.path)}
            print(json.dumps({**record, "modified": int(model.modified), "aliases": names.get(model.name, [])}))
        return 0
    if not models:
        print("No models are downloaded. `millrace models` lists names, `millrace pull NAME` downloads one.")
        return 0
    rows = [("name", "size", "downloaded", "aliases")]
    for model in models:
        day = datetime.fromtimestamp(model.modified, UTC).strftime("%Y-%m-%d")
        rows.append((model.name, f"{model.num_bytes / 1e6:,.0f} MB", day, ", ".join(names.get(model.name, []))))
    print_table(rows, right=(1,))
    return 0
