"""Progress of a training on standard error: stage, bar, rate, time left and the latest loss."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

LINE_EVERY_S = 20.0
"""How often a line is printed where there is no terminal."""


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:.1f}/s" if task.speed else "")


class TrainingBar:
    """A bar on a terminal; elsewhere a line for each new stage and at times."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate())
        times = (TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.fields[note]}"))
        self._bar = Progress(*columns, *times, console=Console(stderr=True))
        self._task: TaskID | None = None
        self._what, self._done, self._total = "", 0, 0
        self._began_at = self._printed_at = 0.0

    def __enter__(self) -> Self:
        if self._live:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._bar.stop()

    def stage(self, what: str, total: int) -> None:
        self._what, self._done, self._total = what, 0, total
        self._began_at = self._printed_at = time.monotonic()
        if self._live:
            self._task = self._bar.add_task(what, total=total or None, note="")
        else:
            print(f"{what}: {total:,}", file=sys.stderr, flush=True)

    def advance(self, count: int, note: str = "") -> None:
        self._done += count
        if self._live and self._task is not None:
            self._bar.update(self._task, advance=count, note=note)
            return
        now = time.monotonic()
        if now - self._printed_at >= LINE_EVERY_S:
            self._printed_at = now
            rate = self._done / (now - self._began_at)
            left = max(0, self._total - self._done) / rate if rate else 0.0
            text = f"{self._what}: {self._done:,} of {self._total:,}, {rate:.1f}/s, {left:.0f} s left {note}"
            print(text.rstrip(), file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        if self._live:
            self._bar.console.print(text)
        else:
            print(text, file=sys.stderr, flush=True)
