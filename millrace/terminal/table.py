"""Plain tables that fit the terminal: columns aligned, the last one cut to the width."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence


def print_table(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> None:
    """Print rows, the first of them the header. Columns in `right` are aligned to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    limit = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    for row in rows:
        cells = [
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        line = "  ".join(cells).rstrip()
        print(line if not limit or len(line) <= limit else line[: limit - 1] + "…")
