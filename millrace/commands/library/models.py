"""`millrace models`: lists the models known by name, what they need, and which are downloaded."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass

from millrace.sources.catalogue import entries
from millrace.sources.catalogue.check import CatalogueCheck, EntryCheck, check_entries, last_check
from millrace.sources.estimate import machine_memory, memory_of
from millrace.sources.known_models import KNOWN_MODELS
from millrace.sources.library import catalogue_bytes, find_local, is_cached
from millrace.terminal.folding import folded
from millrace.terminal.status_line import StatusLine
from millrace.terminal.table import print_table

USAGE = "millrace models [WORD] [--check] [--json]"
EXAMPLES = """\
These models have short names. Any directory, .gguf file or hub name
(org/model) can be served too. Sizes are of the form that this machine would
download: 4-bit GGUF without a GPU, 16-bit safetensors with one. Memory includes
8,192 tokens of context; with a GPU, --quantization fp8 needs about half.

examples:
  millrace models
  millrace models qwen
  millrace models --check
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
    check: EntryCheck | None = None
    """None: not compared with the hub. Models from package registries are pinned by their hash."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("word", nargs="?", default="", metavar="WORD", help="show only names that contain this")
    parser.add_argument("--check", action="store_true", help="compare names, sizes and licences with the hub, once")
    parser.add_argument("--json", action="store_true", help="one JSON line per model")


def run(args: argparse.Namespace) -> int:
    if args.check:
        _check(args.word)
    last, memory = last_check(), machine_memory()
    rows = [row for row in _rows(last) if _is_about(args.word, row.name, row.source, *row.aliases)]
    wrong = [row for row in rows if row.check is not None and row.check.problems]
    if args.json:
        for row in rows:
            print(json.dumps(_record(row, last, memory)))
        return 1 if args.check and wrong else 0
    header = ("name", "size", "memory", "here", "from")
    cells = [
        (
            row.name + (" *" if row.gated else ""),
            f"{row.num_bytes / 1e9:.1f} GB",
            f"{row.memory_bytes / 1e9:.1f} GB",
            "yes" if row.downloaded else "too large" if memory and row.memory_bytes > memory else "",
            row.source,
        )
        for row in rows
    ]
    print_table([header, *cells], right=(1, 2))
    if any(row.gated for row in rows):
        print(folded("\n* gated: the hub wants a login and an accepted licence (see millrace help pull)."))
    if any(cell[3] == "too large" for cell in cells):
        print(folded(f"\ntoo large: needs more than the {memory / 1e9:.0f} GB of this machine."))
    print(folded("\n" + _check_line(rows, last)))
    for row in wrong:
        print(folded(f"  {row.name}: {'; '.join(row.check.problems if row.check else ())}"))
    print(folded("\n`millrace run NAME` downloads and starts one; `millrace ls` lists what is downloaded."))
    return 1 if args.check and wrong else 0


def _is_about(word: str, *names: str) -> bool:
    return word.lower() in " ".join(names).lower()


def _check(word: str) -> None:
    chosen = [entry for entry in entries() if _is_about(word, entry.name, entry.hub, *entry.aliases)]
    with StatusLine() as line:
        check_entries(chosen, lambda name, done, total: line.show("asking the hub", done, total))


def _record(row: _Row, last: CatalogueCheck | None, memory: int) -> dict[str, object]:
    checked = row.check is not None and last is not None
    return {
        "name": row.name,
        "title": row.source,
        "bytes": row.num_bytes,
        "memory": row.memory_bytes,
        "fits": row.memory_bytes <= memory if memory else None,
        "cached": row.downloaded,
        "gated": row.gated,
        "aliases": row.aliases,
        "checked": last.date if checked and last else None,
        "problems": list(row.check.problems) if row.check else [],
        "licence": row.check.licence if row.check else None,
    }


def _check_line(rows: list[_Row], last: CatalogueCheck | None) -> str:
    num_checked = sum(row.check is not None for row in rows)
    if last is None or not num_checked:
        return "Unchecked: names and sizes were entered by hand. `millrace models --check` compares them with the hub."
    num_right = sum(row.check is not None and not row.check.problems for row in rows)
    return f"Compared with {last.hub} on {last.date}: {num_right} of {num_checked} are as the hub has them."


def _rows(last: CatalogueCheck | None) -> list[_Row]:
    rows = [
        _Row(m.name, m.title, m.num_bytes, m.num_bytes + 600_000_000, is_cached(m), m.aliases) for m in KNOWN_MODELS
    ]
    for entry in entries():
        if not entry.is_supported:
            continue
        num_bytes = catalogue_bytes(entry.name)
        memory = int(memory_of(entry, "bf16")) - entry.num_bytes("bf16") + num_bytes
        local = find_local(entry.name) is not None
        check = last.models.get(entry.name) if last is not None else None
        rows.append(_Row(entry.name, entry.hub, num_bytes, memory, local, entry.aliases, entry.gated, check))
    return rows
