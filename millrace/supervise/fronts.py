"""The additional fronts, as their parent sees them: starts them, announces each engine to them, replaces dead ones."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

from millrace.config import Config, as_dict

if TYPE_CHECKING:
    from millrace.serve.app import FrontState
    from millrace.supervise.engine_process import EngineHandle

log = logging.getLogger("millrace.serve")

STOP_GRACE_S = 5.0
FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0


class FrontProcess:
    """One front process. It gets its settings and then each engine as JSON lines on its standard input."""

    def __init__(self, config: Config, directory: str, index: int, incarnation: int) -> None:
        self.index = index
        self.incarnation = incarnation
        self._is_draining = False
        self.process = subprocess.Popen(
            [sys.executable, "-m", "millrace.supervise.front_child", directory, str(index), str(incarnation)],
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C must reach only the parent, which then drains all fronts.
        )
        self._send(as_dict(config))

    def announce_engine(self, engine: EngineHandle) -> None:
        from millrace.supervise.engine_process import EngineProcess

        assert isinstance(engine, EngineProcess), "the config rejects several fronts in one process"
        self._send({"directory": engine.directory, "pid": engine.process.pid})

    def use_settings(self, config: Config) -> None:
        self._send({"settings": as_dict(config)})

    def _send(self, line: object) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # It has died and will be replaced.
            self.process.stdin.write(json.dumps(line).encode() + b"\n")
            self.process.stdin.flush()

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


class Fronts:
    """All fronts but the first, which is this process."""

    def __init__(self, config: Config, directory: str, engine: EngineHandle) -> None:
        self._config, self._directory, self._engine = config, directory, engine
        self._stopping = False
        self._state: FrontState | None = None
        self._fronts = [self._start(index, 0) for index in range(1, config.server.fronts)]

    def _start(self, index: int, incarnation: int) -> FrontProcess:
        front = FrontProcess(self._config, self._directory, index, incarnation)
        front.announce_engine(self._engine)
        return front

    def watch(self, state: FrontState) -> None:
        """Start watching, on this loop, and replace fronts that die."""
        self._state = state
        for front in self._fronts:
            self._watch(front)

    def announce_engine(self, engine: EngineHandle) -> None:
        self._engine = engine
        for front in self._fronts:
            front.announce_engine(engine)

    def use_settings(self, config: Config) -> None:
        """Pass reloaded settings on; a front that is started later gets them too."""
        self._config = config
        for front in self._fronts:
            front.use_settings(config)

    def _watch(self, front: FrontProcess) -> None:
        from millrace.supervise.engine_process import watch_process

        watch_process(front.process.pid, asyncio.get_running_loop(), lambda: self._on_death(front))

    def _on_death(self, front: FrontProcess) -> None:
        if self._stopping or self._state is None:
            return
        front.wait(1.0)
        pause_s = min(FIRST_PAUSE_S * 2**front.incarnation, MAX_PAUSE_S)
        log.error(
            "Front %d ended with code %s; its streams are lost. It is restarted in %.1f s.",
            front.index,
            front.process.returncode,
            pause_s,
        )
        self._state.metrics.front_restarts.inc()
        self._state.client.abort_front(front.index)
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
