"""Long lines folded to the width of the terminal. Output that goes elsewhere is not folded."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from itertools import groupby

_COMMAND = re.compile(r"(?P<start>\s+\S.*?)\s{2,}(?P<meaning>\S.*)")
_MIN_MEANING = 24
"""Least width of a column of meanings. Where there is less, each meaning stands below its command."""


def terminal_width() -> int | None:
    """None if standard output is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def folded(text: str, width: int | None = None) -> str:
    """`text` for standard output, or for a given width. Commands and their meanings are laid out alike in each block
    of indented lines."""
    limit = width or terminal_width()
    if limit is None:
        return text
    out: list[str] = []
    for is_table, group in groupby(text.split("\n"), lambda line: line.startswith(" ")):
        lines = list(group)
        out += _fold_table(lines, limit) if is_table else (part for line in lines for part in _fold(line, limit))
    return "\n".join(out)


def _fold(line: str, width: int) -> Iterator[str]:
    depth = len(line) - len(line.lstrip())
    indent = " " * (depth + 2 if depth else 0)
    if len(line) <= width:
        yield line
    else:
        yield from textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _fold_table(lines: list[str], width: int) -> Iterator[str]:
    if max(map(len, lines)) <= width:
        yield from lines
        return
    rows = [(line, _COMMAND.fullmatch(line)) for line in lines]
    column = max((len(found["start"]) for _, found in rows if found), default=0) + 2
    for line, found in rows:
        if found is None:
            yield from _fold(line, width)
            continue
        start, meaning = found["start"], found["meaning"]
        if width - column >= _MIN_MEANING:
            first, *rest = textwrap.wrap(meaning, width - column)
            yield f"{start:<{column}}{first}"
            yield from (" " * column + part for part in rest)
        else:
            indent = " " * (len(start) - len(start.lstrip()) + 4)
            yield from _fold(start, width)
            yield from (indent + part for part in textwrap.wrap(meaning, max(1, width - len(indent))))
