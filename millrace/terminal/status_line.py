"""A status line on standard error: what is running and how far it is. It disappears at the end."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self, TextIO

_BAR_WIDTH = 24
_SHOWN_EVERY_S = 0.05
_LINE_EVERY_S = 30.0
"""How often a long task prints a line where there is no terminal."""


class StatusLine:
    """Redraws one line on a terminal; elsewhere prints a line for each new task and at times."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._live = self._stream.isatty()
        self._what = ""
        self._drawn_at = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()

    def show(self, what: str, done: int = 0, total: int = 0) -> None:
        """Show progress, `done` of `total` in any unit; a total of 0 means unknown."""
        is_new, self._what = what != self._what, what
        now = time.monotonic()
        if not self._live:
            if is_new:
                self._drawn_at = now
                print(f"{what} …", file=self._stream, flush=True)
            elif total and now - self._drawn_at > _LINE_EVERY_S:
                self._drawn_at = now
                print(f"{what} {min(100 * done // total, 100)}%", file=self._stream, flush=True)
            return
        if not is_new and done < total and now - self._drawn_at < _SHOWN_EVERY_S:
            return
        self._drawn_at = now
        print(f"\r\033[K{what} {_bar(done, total)}", end="", file=self._stream, flush=True)

    def clear(self) -> None:
        if self._live and self._what:
            print("\r\033[K", end="", file=self._stream, flush=True)
        self._what = ""


def _bar(done: int, total: int) -> str:
    if total <= 0:
        return "…"
    full = min(done * _BAR_WIDTH // total, _BAR_WIDTH)
    return f"{'█' * full}{'░' * (_BAR_WIDTH - full)} {min(100 * done // total, 100):3d}%"
