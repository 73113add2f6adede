"""Main module of an additional front: `python -m millrace.supervise.front_child DIRECTORY INDEX INCARNATION`.

Reads one JSON line of settings from standard input, then one line per engine (its socket directory and pid) and one per
change of settings. The front
listens on the same port as the first front and drains on SIGTERM or when standard input closes.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from millrace.config import DEFAULT_MAX_RUNNING, Config, from_dict

if TYPE_CHECKING:
    from millrace.link.client import EngineClient
    from millrace.serve.app import FrontState

UseSettings = Callable[[dict[str, Any]], None]

ENGINE_ENDED = "The engine process ended; see its log. It is being restarted."


def max_open_requests(config: Config) -> int:
    """Maximum requests that one front holds. Admission control limits the total over all fronts."""
    return (config.plan.max_running or DEFAULT_MAX_RUNNING) + config.plan.max_waiting


def main() -> None:
    directory, index, incarnation = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    config = from_dict(json.loads(sys.stdin.buffer.readline()))
    engine = json.loads(sys.stdin.buffer.readline())

    from millrace.observe.logs import set_level, setup_logging
    from millrace.serve.app import run_front
    from millrace.sources.resolve import resolve_model

    setup_logging(config.observe.log_level, process=f"front {index}")

    states: list[FrontState] = []

    def use_settings(tree: dict[str, Any]) -> None:
        changed = from_dict(tree)
        set_level(changed.observe.log_level)
        for state in states:
            state.use_settings(changed)

    async def connect() -> EngineClient:
        return _connect(config, index, incarnation, engine, use_settings)

    run_front(
        config,
        connect,
        resolve_model(config.model.source),
        reuse_port=True,
        directory=directory,
        on_state=states.append,
    )


def _connect(
    config: Config, index: int, incarnation: int, engine: dict[str, Any], use_settings: UseSettings
) -> EngineClient:
    from millrace.link.client import EngineClient
    from millrace.link.front_end import SocketFrontChannel

    client = EngineClient(
        SocketFrontChannel(engine["directory"], index),
        front_index=index,
        incarnation=incarnation,
        max_open=max_open_requests(config),
    )
    _watch_engine(client, engine["pid"])
    _follow_parent(client, index, use_settings)
    return client


def _watch_engine(client: EngineClient, pid: int) -> None:
    from millrace.supervise.engine_process import watch_process

    channel = client.channel

    def on_death() -> None:
        if client.channel is channel:
            client.fail(ENGINE_ENDED)
            client.failure = ENGINE_ENDED

    watch_process(pid, asyncio.get_running_loop(), on_death)


def _follow_parent(client: EngineClient, index: int, use_settings: UseSettings) -> None:
    """Connect to each engine announced on the pipe and take over changed settings. It closes when the parent ends."""
    from millrace.link.front_end import SocketFrontChannel

    loop, descriptor = asyncio.get_running_loop(), sys.stdin.fileno()
    pending = bytearray()

    def on_readable() -> None:
        data = os.read(descriptor, 65536)
        if not data:
            loop.remove_reader(descriptor)
            signal.raise_signal(signal.SIGTERM)
            return
        pending.extend(data)
        while b"\n" in pending:
            line, _, rest = bytes(pending).partition(b"\n")
            pending[:] = rest
            engine = json.loads(line)
            if "settings" in engine:
                use_settings(engine["settings"])
                continue
            client.fail(ENGINE_ENDED)
            client.reconnect(SocketFrontChannel(engine["directory"], index))
            _watch_engine(client, engine["pid"])

    loop.add_reader(descriptor, on_readable)


if __name__ == "__main__":
    main()
