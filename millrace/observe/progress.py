"""A progress bar on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def is_watched() -> bool:
    """True in a terminal or notebook, where somebody sees a progress bar."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


@contextmanager
def count_progress(what: str, total: int, *, enabled: bool) -> Iterator[Callable[[], None]]:
    """Show a bar over `total` items if `enabled`. Yields the function to call after each item."""
    if not enabled:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)
