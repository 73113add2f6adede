"""What the benchmarks share: their figures as a table or as JSON, and their end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from millrace.bench.figures import Figure

EXIT_TERMINATED = 143
"""The exit code that shells report after SIGTERM."""


def until_terminated(measure: Callable[[], int]) -> int:
    try:
        return measure()
    except asyncio.CancelledError:
        return EXIT_TERMINATED


def print_figures(figures: Iterable[Figure], title: str, target: str, *, as_json: bool) -> int:
    """JSON lines as the figures come, or one table at the end."""
    from millrace.bench.figures import print_table

    if as_json:
        for figure in figures:
            print(figure.as_json(target=target), flush=True)
    else:
        print_table(list(figures), title)
    return 0
