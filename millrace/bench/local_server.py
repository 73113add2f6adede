"""A `millrace serve` of our own, started for a benchmark, watched while it runs and stopped afterwards."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Self

from millrace.bench.target import BenchError

_LOG_TAIL_CHARS = 1500
_STOP_WITHIN_S = 20.0


class LocalServer:
    """Use as `with LocalServer(options) as server`. The server's own output goes to a file, shown when it fails."""

    def __init__(self, options: Sequence[str], *, start_timeout_s: float = 300.0) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [sys.executable, "-m", "millrace", "serve", *options, "--port", str(self.port)]
        self._start_timeout_s = start_timeout_s
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        self._process: subprocess.Popen[bytes] | None = None
        self.started_at = 0.0

    def __enter__(self) -> Self:
        self.started_at = time.monotonic()
        # A session of its own, so that a Ctrl-C meant for the benchmark reaches the server through `__exit__` only.
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, start_new_session=True
        )
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._log.close()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def wait_ready(self) -> float:
        """Seconds from the start of the process until it says that it is ready."""
        assert self._process is not None
        while time.monotonic() - self.started_at < self._start_timeout_s:
            if self._process.poll() is not None:
                raise BenchError(f"The server ended with code {self._process.returncode} at start:\n{self._tail()}")
            if await asyncio.to_thread(_answers, f"{self.url}/ready"):
                return time.monotonic() - self.started_at
            await asyncio.sleep(0.02)
        raise BenchError(f"The server was not ready after {self._start_timeout_s:g} s:\n{self._tail()}")

    def _tail(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-_LOG_TAIL_CHARS:]


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
    """Memory of a process and its descendants in MiB, pages that several of them share counted once."""
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
                # The command name in field 2 may hold spaces and brackets; the parent is the second field after it.
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
    """Processor time that a process and its descendants have used so far."""
    return sum(map(own_cpu_seconds, [pid, *descendants(pid)]))


def own_cpu_seconds(pid: int) -> float:
    """Processor time of all threads of a process so far; none if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def command_line(pid: int) -> list[str]:
    """The words that a process was started with; none if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []
