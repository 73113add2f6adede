"""Starts an engine: as a child process reached over Unix sockets, or as a thread of this process.

Either way the caller gets an `EngineHandle`. The child is started before its parent imports anything heavy. It reads
its settings from standard input and ends when that pipe closes: an engine never outlives its server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from millrace.config import Config, as_dict
from millrace.engine.lifetime import serve_engine
from millrace.errors import EngineUnavailable
from millrace.host.bytecode import keep_bytecode
from millrace.host.early_context import has_gpu
from millrace.host.idle_memory import trim_heap
from millrace.host.libraries_ahead import read_libraries_ahead
from millrace.link.address import engine_path, failure_path
from millrace.link.channel import FrontChannel, InProcessLink
from millrace.link.front_end import SocketFrontChannel
from millrace.link.messages import Stop

STOP_TIMEOUT_S = 10.0

OnDeath = Callable[[str], None]


class EngineHandle(Protocol):
    def channel(self, front_index: int = 0) -> FrontChannel: ...

    def watch(self, loop: asyncio.AbstractEventLoop, on_death: OnDeath) -> None:
        """Call `on_death` on the loop, with a message, when the engine has ended."""

    def kill(self) -> None:
        """End the engine now, whatever it is doing."""

    def stop(self) -> None:
        """End the engine, within a bounded time."""


def start_engine(config: Config, spare: EngineChild | None = None) -> EngineHandle:
    """`spare`: a process that waits for settings, used instead of a new one."""
    engine: EngineHandle = EngineThread(config) if config.server.in_process else EngineProcess(config, spare)
    if config.run.device != "cpu" and has_gpu():
        read_libraries_ahead()
    return engine


def avoid_spinning(environment: dict[str, str] | os._Environ[str]) -> None:
    """Let waiting OpenMP threads sleep: spinning takes cores from other processes. Set before torch is imported."""
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")


class EngineThread:
    """Front and engine in one process: the same code path, only the channel differs."""

    def __init__(self, config: Config) -> None:
        if "torch" not in sys.modules:
            avoid_spinning(os.environ)
        self._link = InProcessLink()
        self._thread = threading.Thread(target=serve_engine, args=(config, self._link), name="engine", daemon=True)
        self._thread.start()

    def channel(self, front_index: int = 0) -> FrontChannel:
        return self._link.front

    def watch(self, loop: asyncio.AbstractEventLoop, on_death: OnDeath) -> None:
        def wait() -> None:
            self._thread.join()
            with contextlib.suppress(RuntimeError):  # The loop has closed.
                loop.call_soon_threadsafe(on_death, "The engine ended; see the log.")

        threading.Thread(target=wait, name="engine-watch", daemon=True).start()

    def kill(self) -> None:
        """A thread cannot be killed: ask it to stop. If it does not, it ends with the process."""
        self._link.front.send(Stop())

    def stop(self) -> None:
        self._link.front.send(Stop())
        self._thread.join(timeout=STOP_TIMEOUT_S)
        trim_heap()  # Parts of an engine refer to each other: weights and KV would stay until some later collection.


@dataclass(frozen=True, slots=True)
class EngineChild:
    """An engine process that waits for its settings."""

    process: subprocess.Popen[bytes]
    directory: tempfile.TemporaryDirectory[str]

    def send(self, config: Config) -> bool:
        """False if the process has ended."""
        if self.process.stdin is None:
            raise AssertionError("the child has a pipe for its settings")
        try:
            self.process.stdin.write(json.dumps(as_dict(config)).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return False
        return True

    def discard(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        self.directory.cleanup()


def start_child(num_fronts: int, *, is_spare: bool = False) -> EngineChild:
    """`is_spare`: it will wait, and imports everything meanwhile."""
    directory = tempfile.TemporaryDirectory(prefix="millrace-")
    engine_path(directory.name)  # Raises if the path is too long, before a process is started.
    environment = dict(os.environ)
    avoid_spinning(environment)
    keep_bytecode(environment)
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "millrace.supervise.engine_child",
            directory.name,
            str(num_fronts),
            *(["spare"] if is_spare else []),
        ],
        stdin=subprocess.PIPE,
        env=environment,
        start_new_session=True,  # Ctrl-C must reach only the front, which then drains.
    )
    return EngineChild(process, directory)


class EngineProcess:
    def __init__(self, config: Config, spare: EngineChild | None = None) -> None:
        """Raises EngineUnavailable if the process ends before it has read its settings."""
        if spare is not None and not spare.send(config):  # It has just ended.
            spare.discard()
            spare = None
        child = spare or start_child(max(1, config.server.fronts))
        if child is not spare and not child.send(config):
            code = child.process.wait()
            child.discard()
            raise EngineUnavailable(f"The engine process ended with code {code} before it had read its settings.")
        self._directory = child.directory
        self.process = child.process

    @property
    def directory(self) -> str:
        """Directory of the sockets; fronts in other processes connect there."""
        return self._directory.name

    def channel(self, front_index: int = 0) -> FrontChannel:
        return SocketFrontChannel(self._directory.name, front_index)

    def kill(self) -> None:
        self.process.kill()

    def watch(self, loop: asyncio.AbstractEventLoop, on_death: OnDeath) -> None:
        watch_process(self.process.pid, loop, lambda: on_death(self._exit_message()))

    def _exit_message(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=1.0)
        with contextlib.suppress(OSError):
            return Path(failure_path(self._directory.name)).read_text(encoding="utf-8")
        return f"The engine process ended with code {self.process.returncode}; see its log."

    def stop(self) -> None:
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        try:
            self.process.wait(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._directory.cleanup()


def watch_process(pid: int, loop: asyncio.AbstractEventLoop, on_death: Callable[[], None]) -> None:
    """Call `on_death` on the loop when the process ends. Works for any process, not only for children."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        loop.call_soon(on_death)
        return

    def on_readable() -> None:
        loop.remove_reader(descriptor)
        os.close(descriptor)
        on_death()

    loop.add_reader(descriptor, on_readable)
