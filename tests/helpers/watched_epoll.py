"""Records how an engine's end of the channel waits, so that tests compare its waits and not its CPU time."""

from __future__ import annotations

import select
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.link import engine_end


class WatchedEpoll:
    """The `epoll` of every engine's end made after `install`."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self.timeouts: list[float | None] = []
        """Of each call, in seconds; None is without limit."""
        self.on_block: Callable[[], None] = lambda: None
        """Called before each call that may block."""

    @classmethod
    def install(cls, monkeypatch: pytest.MonkeyPatch) -> WatchedEpoll:
        made = cls()
        flags = {"EPOLLIN": select.EPOLLIN, "EPOLLOUT": select.EPOLLOUT}
        monkeypatch.setattr(engine_end, "select", SimpleNamespace(epoll=lambda: made, **flags))
        return made

    def poll(self, timeout_s: float | None, max_events: int) -> list[tuple[int, int]]:
        self.timeouts.append(timeout_s)
        if timeout_s is None or timeout_s > 0:
            self.on_block()
        return self._epoll.poll(timeout_s, max_events)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._epoll, name)
