"""Long lines folded to the width of the terminal. Output that goes elsewhere is not folded."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Iterator

_COMMAND = re.compile(r"(?P<start>\s*\S.*?)\s{2,}(?P<meaning>\S.*)")


def terminal_width() -> int | None:
    """None if standard output is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def folded(text: str, width: int | None = None) -> str:
    """`text` for standard output, or for a given width. A command and its meaning are split between them."""
    limit = width or terminal_width()
    return text if limit is None else "\n".join(part for line in text.split("\n") for part in _fold(line, limit))


def _fold(line: str, width: int) -> Iterator[str]:
    if len(line) <= width:
        yield line
        return
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    found = _COMMAND.fullmatch(line)
    if found is None:
        yield from textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        return
    yield from _fold(found["start"], width)
    meaning = textwrap.wrap(found["meaning"], max(1, width - len(indent) - 2))
    yield from (f"{indent}  {part}" for part in meaning)
