"""`millrace models`: lists the models known by name, what they need, and which are downloaded."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass

from millrace.sources.catalogue import entries
from millrace.sources.estimate import memory_of
from millrace.sources.known_models import KNOWN_MODELS
from millrace.sources.library import catalogue_bytes, find_local, is_cached
from millrace.terminal.folding import folded
from millrace.terminal.table import print_table

USAGE = "millrace models [WORD] [--json]"
EXAMPLES = """\
These models have short names. Any directory, .gguf file or hub name
(org/model) can be served too. Sizes are of the form that this machine would
download: 4-bit GGUF without a GPU, 16-bit safetensors with one. Memory includes
8,192 tokens of context; with a GPU, --quantization fp8 needs about half.

examples:
  millrace models
  millrace models qwen
  millrace run llama3.2-1b"""


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    source: str
    num_bytes: int
    memory_bytes: int
    downloaded: bool
    aliases: tuple[str, ...]
    gated: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("word", nargs="?", default="", metavar="WORD", help="show only names that contain this")
    parser.add_argument("--json", action="store_true", help="one JSON line per model")


def run(args: argparse.Namespace) -> int:
    rows = [row for row in _rows() if args.word.lower() in " ".join((row.name, row.source, *row.aliases)).lower()]
    if args.json:
        for row in rows:
            record = {"name": row.name, "title": row.source, "bytes": row.num_bytes, "memory": row.memory_bytes}
            print(json.dumps({**record, "cached": row.downloaded, "gated": row.gated, "aliases": row.aliases}))
        return 0
    header = ("name", "size", "memory", "here", "from")
    cells = [
        (
            row.name,
            f"{row.num_bytes / 1e9:.1f} GB",
            f"{row.memory_bytes / 1e9:.1f} GB",
            "yes" if row.downloaded else "",
            row.source + (" (gated)" if row.gated else ""),
        )
        for row in rows
    ]
    print_table([header, *cells], right=(1, 2))
    print(folded("\n`millrace run NAME` downloads and starts one; `millrace ls` lists what is downloaded."))
    return 0


def _rows() -> list[_Row]:
    rows = [
        _Row(m.name, m.title, m.num_bytes, m.num_bytes + 600_000_000, is_cached(m), m.aliases) for m in KNOWN_MODELS
    ]
    for entry in entries():
        if not entry.is_supported:
            continue
        num_bytes = catalogue_bytes(entry.name)
        memory = int(memory_of(entry, "bf16")) - entry.num_bytes("bf16") + num_bytes
        local = find_local(entry.name) is not None
        rows.append(_Row(entry.name, entry.hub, num_bytes, memory, local, entry.aliases, entry.gated))
    return rows
