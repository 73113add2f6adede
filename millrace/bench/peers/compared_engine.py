"""One engine of a comparison: started here or already running, paused while another engine is measured."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from millrace.bench.errors import BenchError
from millrace.bench.figures import Figure
from millrace.bench.http.target import Target
from millrace.bench.local_server import ServerProcess, cpu_seconds, descendants, resident_mib

IdleMode = Literal["pause", "keep", "stop"]
"""What happens between turns to an engine started here: SIGSTOP, nothing, or stop and restart."""

IDLE_WATCH_S = 2.0
_SETTLE_S = 1.0
_PROBE_TIMEOUT_S = 60.0
_EXIT_TIMEOUT_S, _POLL_S = 2.0, 0.02
_MB_PER_MIB = 1.048576


class ComparedEngine:
    """Started by `open`, measured between `begin_turn` and `end_turn`, stopped by `close`."""

    def __init__(
        self,
        name: str,
        *,
        url: str = "",
        pid: int = 0,
        make: Callable[[], ServerProcess] | None = None,
        api_key: str = "",
        workloads: Sequence[str] = (),
        between: IdleMode = "pause",
    ) -> None:
        """Either `url` (and `pid`, if known) of a running server, or `make`, which creates a process to start.
        Empty `workloads` means all."""
        self.name = name
        self.workloads = tuple(workloads)
        self._url, self._pid, self._api_key = url, pid, api_key
        self._make = make
        self._idle_mode = between
        self._server: ServerProcess | None = None
        self._paused: list[int] = []

    @property
    def pid(self) -> int:
        return self._server.pid if self._server is not None else self._pid

    @property
    def is_stopped(self) -> bool:
        """True if it cannot use CPU time now."""
        return bool(self._paused) or (self._make is not None and self._server is None)

    def target(self) -> Target:
        url = self._server.url if self._server is not None else self._url
        return Target(url, api_key=self._api_key)

    async def open(self) -> list[Figure]:
        """Start it if needed. Returns figures of its start (if started here), idle memory and idle CPU use."""
        figures = []
        if self._make is not None:
            figures += await self._start()
        async with asyncio.timeout(_PROBE_TIMEOUT_S), self.target() as target:
            await target.find_model()
            await target.complete("Hello", 1)
        if self.pid:
            await asyncio.sleep(_SETTLE_S)
            figures.append(Figure("server", "memory at rest", resident_mib(self.pid) * _MB_PER_MIB, "MB"))
            figures.append(Figure("server", "CPU at idle", await self._idle_percent(), "%"))
        await self.end_turn()
        return figures

    async def begin_turn(self) -> None:
        if self._paused:
            self._signal(signal.SIGCONT)
        elif self._make is not None and self._server is None:
            await self._start()
        self.check_alive()

    async def end_turn(self) -> None:
        if self._server is None or self._idle_mode == "keep":
            return
        if self._idle_mode == "stop":
            await self._stop()
        else:
            self._paused = [self._server.pid, *descendants(self._server.pid)]
            self._signal(signal.SIGSTOP)

    async def close(self) -> None:
        if self._paused:
            self._signal(signal.SIGCONT)
        await self._stop()

    def check_alive(self) -> None:
        """Raise if the process has ended; clearer than the connection error that would follow."""
        if self._server is not None and not self._server.is_running:
            raise BenchError(f"{self.name} has exited:\n{self._server.tail()}")
        if self._pid and not os.path.isdir(f"/proc/{self._pid}"):
            raise BenchError(f"{self.name} has exited: there is no process {self._pid}.")

    async def cause_of(self, error: BaseException) -> BaseException:
        """The cause of an error: a crashing process closes its connections a moment before it ends."""
        until = time.monotonic() + _EXIT_TIMEOUT_S
        while time.monotonic() < until:
            try:
                self.check_alive()
            except BenchError as ended:
                return ended
            await asyncio.sleep(_POLL_S)
        return error

    def cpu_seconds(self) -> float:
        return cpu_seconds(self.pid) if self.pid else 0.0

    async def _start(self) -> list[Figure]:
        assert self._make is not None
        server = self._server = self._make()
        server.start()
        ready_s = await server.wait_ready()
        async with asyncio.timeout(_PROBE_TIMEOUT_S), self.target() as target:
            await target.find_model()
            first = await target.complete("Hello", 1)
        if first.error:
            raise BenchError(f"{self.name} is ready, but its first request failed: {first.error}")
        first_s = first.ended_at - server.started_at
        return [
            Figure("server", "start to ready", ready_s, "s"),
            Figure("server", "start to first token", first_s, "s"),
        ]

    async def _stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await asyncio.to_thread(server.stop)

    async def _idle_percent(self) -> float:
        """CPU use while idle, in percent of one core."""
        before, started = self.cpu_seconds(), time.monotonic()
        await asyncio.sleep(IDLE_WATCH_S)
        return 100 * (self.cpu_seconds() - before) / (time.monotonic() - started)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._paused:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        if number == signal.SIGCONT:
            self._paused = []


class CpuWatch:
    """CPU use, while one engine is measured, by the other engines and by unrelated processes."""

    def __init__(self, measured: ComparedEngine, others: Sequence[ComparedEngine]) -> None:
        self._measured = measured
        self._own_before = measured.cpu_seconds() + time.process_time()
        self._before = [(other, other.cpu_seconds()) for other in others if other.pid and not other.is_stopped]
        self._machine_before = machine_busy_seconds()
        self._started = time.monotonic()

    def busy(self, at_least_percent: float) -> Iterator[tuple[str, float]]:
        """The other engines that used at least this many percent of one core, with their use."""
        for other, before in self._before:
            percent = self._percent(other.cpu_seconds() - before)
            if percent >= at_least_percent:
                yield other.name, percent

    def other_processes_percent(self) -> float | None:
        """Percent of one core used by unrelated processes; None if the measured engine's pid is unknown."""
        if not self._measured.pid:
            return None
        own = self._measured.cpu_seconds() + time.process_time() - self._own_before
        engines = sum(other.cpu_seconds() - before for other, before in self._before)
        return max(self._percent(machine_busy_seconds() - self._machine_before - own - engines), 0.0)

    def _percent(self, seconds: float) -> float:
        return 100 * seconds / max(time.monotonic() - self._started, 1e-3)


def machine_busy_seconds() -> float:
    """CPU time of the whole machine so far, steal time included."""
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _idle, _io_wait, irq, soft_irq, steal = map(int, file.readline().split()[1:9])
    return (user + nice + system + irq + soft_irq + steal) / os.sysconf("SC_CLK_TCK")
