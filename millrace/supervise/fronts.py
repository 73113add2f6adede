"""The additional fronts, as their parent sees them: starts them, tells them about models, replaces dead ones.

Parent and front talk in JSON lines. The front gets its settings first, then events about models; it asks for models to
be loaded or unloaded on a pipe of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from millrace.config import Config, as_dict
from millrace.model_settings import ModelSettings
from millrace.settings_changes import with_live_changes

log = logging.getLogger("millrace.serve")

STOP_GRACE_S = 5.0
FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0

ENGINE_EVENTS = ("engine", "failed", "unloaded")
"""Each replaces the one before."""

OnOrder = Callable[[dict[str, Any]], None]
"""Called with what a front asks of the supervisor: `order` (load, unload, keep_alive), `model`, `seconds`."""


def settings_line(models: Sequence[ModelSettings]) -> list[dict[str, Any]]:
    return [
        {
            "name": model.name,
            "aliases": model.aliases,
            "config": as_dict(model.config),
            "loads_at_start": model.loads_at_start,
        }
        for model in models
    ]


class FrontProcess:
    """One front process."""

    def __init__(self, models: Sequence[ModelSettings], directory: str, index: int, incarnation: int) -> None:
        self.index = index
        self.incarnation = incarnation
        self._is_draining = False
        self._orders, orders_end = os.pipe()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._unread = bytearray()
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "millrace.supervise.front_child"),
                *(directory, str(index), str(incarnation), str(orders_end)),
            ],
            stdin=subprocess.PIPE,
            pass_fds=(orders_end,),
            start_new_session=True,  # Ctrl-C must reach only the parent, which then drains all fronts.
        )
        os.close(orders_end)
        self.send(settings_line(models))

    def send(self, line: object) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # It has died and will be replaced.
            self.process.stdin.write(json.dumps(line).encode() + b"\n")
            self.process.stdin.flush()

    def follow(self, on_order: OnOrder) -> None:
        """Pass what the front asks for to `on_order`, on this loop, until its pipe closes."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._orders, self._read, on_order)

    def _read(self, on_order: OnOrder) -> None:
        data = os.read(self._orders, 65536)
        if not data:
            self._unfollow()
            return
        *lines, rest = (bytes(self._unread) + data).split(b"\n")
        self._unread[:] = rest
        for line in lines:
            on_order(json.loads(line))

    def _unfollow(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None and not loop.is_closed():
            loop.remove_reader(self._orders)

    def drain(self) -> None:
        """Send SIGTERM once; a second signal would stop the front at once."""
        if not self._is_draining:
            self._is_draining = True
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float) -> None:
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def close(self) -> None:
        """On the loop's thread, after `wait`."""
        self._unfollow()
        os.close(self._orders)


class Fronts:
    """All fronts but the first, which is this process."""

    def __init__(self, models: Sequence[ModelSettings], directory: str) -> None:
        self._models = models
        self._directory = directory
        self._stopping = False
        self._on_order: OnOrder = lambda order: None
        self._on_lost: Callable[[int], None] = lambda index: None
        self._news: dict[str, dict[str, dict[str, Any]]] = {}
        """By model: the last event of each kind, for fronts that start later."""
        self._fronts = [self._start(index, 0) for index in range(1, models[0].config.server.fronts)]

    def _start(self, index: int, incarnation: int) -> FrontProcess:
        front = FrontProcess(self._models, self._directory, index, incarnation)
        for events in self._news.values():
            for event in events.values():
                front.send(event)
        return front

    def watch(self, on_order: OnOrder, on_lost: Callable[[int], None]) -> None:
        """Start watching, on this loop, and replace fronts that die. `on_lost` is called with the index of a dead
        one."""
        self._on_order, self._on_lost = on_order, on_lost
        for front in self._fronts:
            self._watch(front)

    def announce(self, event: dict[str, Any]) -> None:
        """Tell all fronts, also those that start later. (That a model is unloaded, running fronts learn from the
        engine's last message.)"""
        news = self._news.setdefault(event["model"], {})
        if event["event"] in ENGINE_EVENTS:
            for kind in ENGINE_EVENTS:
                news.pop(kind, None)
        news[event["event"]] = event
        for front in self._fronts:
            front.send(event)

    def use_settings(self, config: Config) -> None:
        """Pass reloaded settings on; a front that is started later gets them too."""
        self._models = [
            dataclasses.replace(model, config=with_live_changes(model.config, config)) for model in self._models
        ]
        for front in self._fronts:
            front.send({"event": "settings", "settings": as_dict(config)})

    def _watch(self, front: FrontProcess) -> None:
        from millrace.supervise.engine_process import watch_process

        front.follow(self._on_order)
        watch_process(front.process.pid, asyncio.get_running_loop(), lambda: self._on_death(front))

    def _on_death(self, front: FrontProcess) -> None:
        if self._stopping:
            return
        front.wait(1.0)
        front.close()
        pause_s = min(FIRST_PAUSE_S * 2**front.incarnation, MAX_PAUSE_S)
        log.error(
            "Front %d ended with code %s; its streams are lost. It is restarted in %.1f s.",
            front.index,
            front.process.returncode,
            pause_s,
        )
        self._on_lost(front.index)
        asyncio.get_running_loop().call_later(pause_s, self._replace, front)

    def _replace(self, front: FrontProcess) -> None:
        if not self._stopping:
            successor = self._start(front.index, front.incarnation + 1)
            self._fronts[self._fronts.index(front)] = successor
            self._watch(successor)

    def drain(self) -> None:
        self._stopping = True
        for front in self._fronts:
            front.drain()

    def stop(self, timeout_s: float) -> None:
        self.drain()
        for front in self._fronts:
            front.wait(timeout_s + STOP_GRACE_S)

    def kill(self) -> None:
        self._stopping = True
        for front in self._fronts:
            with contextlib.suppress(ProcessLookupError):
                front.process.kill()
