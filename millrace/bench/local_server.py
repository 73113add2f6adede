"""Starts a server for a benchmark, waits until it is ready, reads its memory and CPU time, and stops it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Self

from millrace.bench.errors import BenchError

_LOG_TAIL_CHARS = 1500
_STOP_TIMEOUT_S = 20.0


class ServerProcess:
    """Any server process, ours or a peer's. Its output goes to a file and is shown if it fails. A context manager."""

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        *,
        ready_path: str = "/ready",
        start_timeout_s: float = 300.0,
    ) -> None:
        """`ready_path` returns 200 once the server takes requests."""
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._command = list(command)
        self._ready_path = ready_path
        self._start_timeout_s = start_timeout_s
        self._log: IO[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.started_at = 0.0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def start(self) -> None:
        _exit_on_sigterm()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by stop
        self.started_at = time.monotonic()
        try:
            # Its own session: Ctrl-C must reach the benchmark only, which then stops the server.
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,
            )
        except OSError as error:
            raise BenchError(f"Cannot start {self._command[0]}: {error.strerror or error}.") from error

    def stop(self) -> None:
        """End the process and its descendants: SIGTERM first, SIGKILL after a timeout."""
        process, self._process = self._process, None
        log, self._log = self._log, None
        if log is not None:
            log.close()
        if process is None:
            return
        family = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pid in family:
            _kill_if_orphaned(pid, process.pid)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def wait_ready(self) -> float:
        """Seconds from the start of the process until it is ready."""
        assert self._process is not None
        while time.monotonic() - self.started_at < self._start_timeout_s:
            if self._process.poll() is not None:
                raise BenchError(f"The server exited with code {self._process.returncode} at start:\n{self.tail()}")
            if await asyncio.to_thread(_answers, f"{self.url}{self._ready_path}"):
                return time.monotonic() - self.started_at
            await asyncio.sleep(0.02)
        raise BenchError(f"The server was not ready after {self._start_timeout_s:g} s:\n{self.tail()}")

    def tail(self) -> str:
        """The last part of its output."""
        assert self._log is not None
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-_LOG_TAIL_CHARS:]


class LocalServer(ServerProcess):
    """`millrace serve` of this installation."""

    def __init__(self, options: Sequence[str], *, start_timeout_s: float = 300.0) -> None:
        port = free_port()
        command = [sys.executable, "-m", "millrace", "serve", *options, "--port", str(port)]
        super().__init__(command, port, start_timeout_s=start_timeout_s)


def _exit_on_sigterm() -> None:
    """Leave as after an error, through the code that stops the servers, unless somebody handles SIGTERM already."""

    def leave(number: int, _: object) -> None:
        # `timeout` sends it twice; the second one must not end the code that stops the servers.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(128 + number)

    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, leave)


def cancel_on_sigterm() -> None:
    """Cancel the current task on SIGTERM, so that its cleanup stops the servers it has started."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None

    def cancel() -> None:
        loop.add_signal_handler(signal.SIGTERM, lambda: None)  # See `_exit_on_sigterm`.
        task.cancel()

    loop.add_signal_handler(signal.SIGTERM, cancel)


def _kill_if_orphaned(pid: int, session: int) -> None:
    """Kill a child that outlived its server. The session id is checked because the pid may have been reused."""
    try:
        if os.getsid(pid) == session:
            os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2.0) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        assert isinstance(port, int)
        return port


def resident_mib(pid: int) -> float:
    """Memory of a process and its descendants in MiB; shared pages count once."""
    return sum(_proportional_kib(process) for process in [pid, *descendants(pid)]) / 1024


def _proportional_kib(pid: int) -> int:
    for name, label in (("smaps_rollup", "Pss:"), ("status", "VmRSS:")):
        try:
            lines = Path(f"/proc/{pid}/{name}").read_text().splitlines()
        except OSError:
            continue
        found = [int(line.split()[1]) for line in lines if line.startswith(label)]
        if found:
            return found[0]
    return 0


def descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # The command name (field 2) may contain spaces and parentheses; the parent pid is field 4.
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found: list[int] = []
    stack = [pid]
    while stack:
        below = children.get(stack.pop(), [])
        found += below
        stack += below
    return found


def cpu_seconds(pid: int) -> float:
    """CPU time used so far by a process and its descendants."""
    return sum(map(own_cpu_seconds, [pid, *descendants(pid)]))


def own_cpu_seconds(pid: int) -> float:
    """CPU time used so far by all threads of a process; 0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def command_line(pid: int) -> list[str]:
    """The arguments that a process was started with; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []
