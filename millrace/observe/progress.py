"""A progress bar on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def is_watched() -> bool:
    """True in a terminal or notebook, where somebody sees a progress bar."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


Stage = Callable[[str, int, int], None]
"""Called with what is being done, and how much of how much of it is done; a total of 0 means unknown."""


@contextmanager
def stage_progress(*, enabled: bool) -> Iterator[Stage]:
    """Show the stages of a long start, each with its share, if `enabled`. They disappear at the end."""
    if not enabled:
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting", total=None)
        yield lambda what, done, total: progress.update(task, description=what, completed=done, total=total or None)


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
