"""Progress bar for model downloads, on standard error."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from millrace.sources.resolve import ModelFiles, resolve_model


def fetch_with_progress(source: str, console: Console | None = None, *, offline: bool = False) -> ModelFiles:
    """Resolve `source`, with a progress bar, rate and time left while files are downloaded."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console or Console(stderr=True),
        transient=True,
    )
    with bar:
        return resolve_model(source, progress=_Display(bar), offline=offline)


class _Display:
    """Shows (what, done, total) reports as tasks of one bar; a new `what` replaces the task."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._what = ""
        self._task: TaskID | None = None

    def __call__(self, what: str, done: int, total: int) -> None:
        if what != self._what and self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None
        if self._task is None:
            self._task = self._bar.add_task(what, total=total or None)
            self._what = what
        self._bar.update(self._task, completed=done, total=total or None)
