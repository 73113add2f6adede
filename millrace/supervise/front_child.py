"""Main module of an additional front: `python -m millrace.supervise.front_child DIRECTORY INDEX INCARNATION ORDERS`.

Reads one JSON line with the models and their settings from standard input, then one line per event: an engine was
started (its socket directory and pid), a model cannot be loaded, a keep-alive time has changed. Writes a line to the
descriptor ORDERS to have a model loaded or unloaded. The front listens on the same port as the first front and drains
on SIGTERM or when standard input closes.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from millrace.config import DEFAULT_MAX_RUNNING, Config, from_dict
from millrace.model_settings import ModelSettings

if TYPE_CHECKING:
    from millrace.link.client import EngineClient
    from millrace.serve.app import FrontState

ENGINE_ENDED = "The engine process ended; see its log. It is being restarted."
LAST_MESSAGES_S = 5.0
"""Bound on the wait for the last messages of a retired engine."""
LAST_MESSAGE_S = 0.3
"""Wait after the process has ended: its last messages may still be in transit."""


def max_open_requests(config: Config) -> int:
    """Maximum requests that one front holds. Admission control limits the total over all fronts."""
    return (config.plan.max_running or DEFAULT_MAX_RUNNING) + config.plan.max_waiting


def main() -> None:
    directory, index, incarnation, orders = sys.argv[1], *map(int, sys.argv[2:5])
    first_line, rest = read_line(sys.stdin.fileno())
    models = read_settings(first_line)

    from millrace.observe.logs import setup_logging
    from millrace.serve.app import run_front

    setup_logging(models[0].config.observe.log_level, process=f"front {index}")
    parent = Parent(models, index, orders, rest)

    async def connect() -> Mapping[str, EngineClient]:
        return parent.connect(incarnation)

    run_front(models, connect, parent, on_state=parent.follow, reuse_port=True, directory=directory)


def read_line(descriptor: int) -> tuple[bytes, bytes]:
    """The first line, and what came after it. Unbuffered, because later lines are read by the event loop."""
    data = b""
    while b"\n" not in data:
        more = os.read(descriptor, 65536)
        if not more:
            raise SystemExit("The server ended before it had sent its settings.")
        data += more
    line, _, rest = data.partition(b"\n")
    return line, rest


def read_settings(line: bytes) -> tuple[ModelSettings, ...]:
    return tuple(
        ModelSettings(model["name"], tuple(model["aliases"]), from_dict(model["config"]), model["loads_at_start"])
        for model in json.loads(line)
    )


class Parent:
    """The supervising process, as this front sees it. Implements `serve.model_control.ModelControl`."""

    def __init__(self, models: Sequence[ModelSettings], index: int, orders: int, unread: bytes) -> None:
        self._models = models
        self._index = index
        self._orders = orders
        self._clients: dict[str, EngineClient] = {}
        self._turns: dict[str, asyncio.Lock] = {model.name: asyncio.Lock() for model in models}
        """Events about one model are handled in order."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._unread = bytearray(unread)

    def connect(self, incarnation: int) -> Mapping[str, EngineClient]:
        """A client for each model, without engines: those come as events."""
        from millrace.link.client import EngineClient

        for model in self._models:
            client = self._clients[model.name] = EngineClient(
                None,
                front_index=self._index,
                incarnation=incarnation,
                max_open=max_open_requests(model.config),
                resume_s=model.config.server.resume_s,
            )
            client.on_wanted = lambda name=model.name: self._order("load", name)  # type: ignore[misc]
            client.on_lacks_memory = lambda message: True  # The parent decides.
        return self._clients

    # ── orders ────────────────────────────────────────────────────────────────────────────────────────────────────────
    async def load(self, name: str) -> None:
        self._order("load", name)

    async def unload(self, name: str) -> None:
        self._order("unload", name)

    async def keep_alive(self, name: str, seconds: float) -> None:
        self._order("keep_alive", name, seconds)

    def _order(self, order: str, name: str, seconds: float = 0.0) -> None:
        """Lines are shorter than the pipe's atomic size. If the parent is gone, this front ends too."""
        line = json.dumps({"order": order, "model": name, "seconds": seconds}) + "\n"
        try:
            os.write(self._orders, line.encode())
        except BrokenPipeError:
            pass

    # ── events ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def follow(self, state: FrontState) -> None:
        """Handle the events on the pipe. It closes when the parent ends."""
        loop, descriptor = asyncio.get_running_loop(), sys.stdin.fileno()

        def on_readable() -> None:
            data = os.read(descriptor, 65536)
            if not data:
                loop.remove_reader(descriptor)
                signal.raise_signal(signal.SIGTERM)
                return
            handle_lines(data)

        def handle_lines(data: bytes) -> None:
            *lines, rest = (bytes(self._unread) + data).split(b"\n")
            self._unread[:] = rest
            for line in lines:
                task = loop.create_task(self._handle(state, json.loads(line)))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

        handle_lines(b"")
        loop.add_reader(descriptor, on_readable)

    async def _handle(self, state: FrontState, event: dict[str, Any]) -> None:
        if event["event"] == "settings":
            use_settings(state, from_dict(event["settings"]))
            return
        name = event["model"]
        client = self._clients[name]
        async with self._turns[name]:
            if event["event"] == "keep_alive":
                state.models.find(name).keep_alive_s = event["seconds"]
            elif event["event"] == "unloaded":
                state.models.find(name).loads_at_start = False  # It has been loaded before this front started.
            elif event["event"] == "failed":
                client.give_up(event["message"])
            else:
                await self._connect_engine(client, event)

    async def _connect_engine(self, client: EngineClient, event: dict[str, Any]) -> None:
        from millrace.link.front_end import SocketFrontChannel

        if client.failure is None and not client.is_unloaded:
            # The last engine has retired or died: first handle all that it sent.
            await client.wait_unloaded(LAST_MESSAGES_S)
        client.reconnect(SocketFrontChannel(event["directory"], self._index))
        _watch_engine(client, event["pid"])


def use_settings(state: FrontState, changed: Config) -> None:
    from millrace.observe.logs import set_level

    set_level(changed.observe.log_level)
    state.use_live_settings(changed)


def _watch_engine(client: EngineClient, pid: int) -> None:
    from millrace.supervise.engine_process import watch_process

    channel, loop = client.channel, asyncio.get_running_loop()

    def on_death() -> None:
        loop.call_later(LAST_MESSAGE_S, fail)

    def fail() -> None:
        if client.channel is channel:
            client.fail(ENGINE_ENDED)
            client.failure = ENGINE_ENDED

    watch_process(pid, loop, on_death)


if __name__ == "__main__":
    main()
