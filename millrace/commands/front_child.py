"""A further front: `python -m millrace.commands.front_child DIRECTORY INDEX ENGINE_PID`, settings as JSON on stdin.

It listens on the same port as the first front, connects to the engine's sockets in DIRECTORY, and drains when it is
told to or when its parent is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

from millrace.config import MOST_RUNNING, Config, as_dict, from_dict

if TYPE_CHECKING:
    from millrace.engine.process import EngineHandle
    from millrace.link.client import EngineClient

_STOP_GRACE_S = 5.0


class FrontProcess:
    """The parent's view of one."""

    def __init__(self, config: Config, directory: str, index: int, engine_pid: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "millrace.commands.front_child", directory, str(index), str(engine_pid)],
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches the parent alone, which then tells all fronts to drain.
        )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(as_dict(config)).encode() + b"\n")
        self._process.stdin.flush()

    def drain(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float) -> None:
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()


def start_fronts(config: Config, engine: EngineHandle) -> list[FrontProcess]:
    """All fronts but the first, which is the caller."""
    if config.server.fronts == 1:
        return []
    from millrace.engine.process import EngineProcess

    assert isinstance(engine, EngineProcess), "config refuses several fronts in one process"
    return [
        FrontProcess(config, engine.directory, index, engine.process.pid) for index in range(1, config.server.fronts)
    ]


def stop_fronts(fronts: list[FrontProcess], drain_timeout_s: float) -> None:
    for front in fronts:
        front.drain()
    for front in fronts:
        front.wait(drain_timeout_s + _STOP_GRACE_S)


def max_open_requests(config: Config) -> int:
    """This front's share of the requests that may run or wait; beyond it the answer is a 429."""
    most = (config.plan.max_running or MOST_RUNNING) + config.plan.max_waiting
    return -(-most // config.server.fronts)


def main() -> None:
    directory, index, engine_pid = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    config = from_dict(json.loads(sys.stdin.buffer.readline()))

    from millrace.observe.logs import setup_logging
    from millrace.serve.app import run_front
    from millrace.sources.resolve import resolve_model

    setup_logging(config.observe.log_level, process=f"front {index}")

    async def connect() -> EngineClient:
        return _connect(config, directory, index, engine_pid)

    run_front(config, connect, resolve_model(config.model.source), reuse_port=True)


def _connect(config: Config, directory: str, index: int, engine_pid: int) -> EngineClient:
    from millrace.engine.process import watch_process
    from millrace.link.channel import ZmqFrontChannel
    from millrace.link.client import EngineClient

    channel = ZmqFrontChannel(directory, index)
    client = EngineClient(channel, front_index=index, max_open=max_open_requests(config))
    loop = asyncio.get_running_loop()
    watch_process(engine_pid, loop, lambda: client.fail("The engine process ended; its log says why."))
    _drain_with_parent(loop)
    return client


def _drain_with_parent(loop: asyncio.AbstractEventLoop) -> None:
    """The pipe that brought the settings closes when the parent ends."""

    def on_readable() -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            loop.remove_reader(sys.stdin.fileno())
            signal.raise_signal(signal.SIGTERM)

    loop.add_reader(sys.stdin.fileno(), on_readable)


if __name__ == "__main__":
    main()
