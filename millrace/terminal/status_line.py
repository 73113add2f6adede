"""One line on standard error that says what is going on and how far it has come; gone when it is over."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self, TextIO

_BAR_WIDTH = 24
_SHOWN_EVERY_S = 0.05


class StatusLine:
    """On a terminal a line that is redrawn; elsewhere one plain line for each new thing that is done."""

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
        """`done` of `total` in any unit; a total of 0 means that nobody knows."""
        is_new, self._what = what != self._what, what
        if not self._live:
            if is_new:
                print(f"{what} …", file=self._stream, flush=True)
            return
        now = time.monotonic()
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
