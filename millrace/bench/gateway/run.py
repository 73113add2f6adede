"""What a gateway adds over null replicas: time to the first token, tokens per second."""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import aiohttp

from millrace.bench.errors import BenchError
from millrace.bench.figures import Figure, percentile
from millrace.bench.gateway.null_replica import MODEL
from millrace.bench.http.client_processes import ClientProcesses

_START_S = 60.0
MIN_TOKENS_PER_S, MIN_STREAMS = 100_000, 2048
MAX_ADDED_P50_MS, MAX_ADDED_P99_MS = 1.0, 3.0
"""Bars of a gateway that has two cores of a server to itself."""
WARM_UP_S = 2.0
_UNCOUNTED = 20
_FIRST_TOKENS = 300
"""Requests whose time to the first token is measured, one at a time, directly and through the gateway in turn."""


@dataclass(frozen=True)
class GatewayBench:
    num_replicas: int = 4
    num_streams: int = 256
    num_tokens: int = 128
    seconds: float = 5.0
    token_ms: float = 0.0
    """Time from token to token of a stream. With 0 many tokens arrive at once: that is not what an engine does."""
    num_gateways: int = 1
    """Processes behind one port."""
    num_clients: int = 1
    """Processes that hold the streams."""
    cores: tuple[int, ...] = ()
    """Those of the gateways; all else runs on the others. Empty: nothing is pinned."""

    async def run(self) -> list[Figure]:
        async with AsyncExitStack() as stack:
            stack.enter_context(everything_but(self.cores))
            urls = await self.replicas(stack)
            gateway, pids = await self.gateways(stack, urls)
            session = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
            idle = await self._first_tokens(session, urls[0], gateway)
            clients = await asyncio.to_thread(self.clients, stack.enter_context(ExitStack()), gateway)
            begin, end = clients.begin(warm_up_s=WARM_UP_S, seconds=self.seconds)
            await asyncio.sleep(begin - time.monotonic())
            cpu_before = sum(map(cpu_s, pids))
            loaded = await self._first_tokens(session, urls[0], gateway, end)
            await asyncio.sleep(max(0.0, end - time.monotonic()))
            used_s = sum(map(cpu_s, pids)) - cpu_before
            tally = await asyncio.to_thread(clients.results)
        if tally.errors:
            raise BenchError(f"{tally.errors} streams failed, first: {tally.first_error}")
        name = f"{self.num_replicas} replicas, {self.token_ms:g} ms per token"
        busy = f"{name}, {self.num_streams} streams, {self.num_gateways} gateway{'s' * (self.num_gateways > 1)}"
        busy += f" on cores {','.join(map(str, self.cores))}" if self.cores else ""
        rate = tally.frames / self.seconds
        return [
            Figure(name, "first token direct p50", percentile(idle.direct, 50) * 1e3, "ms", len(idle.direct)),
            *_added(name, idle),
            Figure(busy, "tokens/s", rate, "1/s", note=_bar(rate, MIN_TOKENS_PER_S, at_least=True)),
            Figure(busy, "CPU of the gateway per token", used_s / max(1, tally.frames) * 1e6, "µs"),
            Figure(busy, "open streams", self.num_streams, "", note=_bar(self.num_streams, MIN_STREAMS, at_least=True)),
            *_added(busy, loaded),
        ]

    async def replicas(self, stack: AsyncExitStack) -> list[str]:
        arguments = ("millrace.bench.gateway.null_replica", "--token-ms", str(self.token_ms))
        return [(await stack.enter_async_context(_program(*arguments)))[0] for _ in range(self.num_replicas)]

    async def gateways(self, stack: AsyncExitStack, urls: list[str], *options: str) -> tuple[str, list[int]]:
        """Their URL and their processes, once all of them have found the replicas."""
        url, port, pids = "", "0", []
        for number in range(self.num_gateways):
            arguments = ("--port", port, "--reuse-port", "--replicas", ",".join(urls), *options)
            url, pid = await stack.enter_async_context(_program("millrace", "gateway", *arguments))
            port = url.rpartition(":")[2]
            pids.append(pid)
            if self.cores:
                spread = self.num_gateways >= len(self.cores)
                _pin(pid, {self.cores[number % len(self.cores)]} if spread else set(self.cores))
        await _until_ready(url, self.num_replicas, self.num_gateways)
        return url, pids

    def clients(self, stack: ExitStack, url: str, key: str = "") -> ClientProcesses:
        return ClientProcesses(
            get_context("spawn"),
            stack,
            port=int(url.rpartition(":")[2]),
            model=MODEL,
            streams=self.num_streams,
            num_tokens=self.num_tokens,
            count=self.num_clients,
            key=key,
        )

    async def _first_tokens(
        self, session: aiohttp.ClientSession, direct: str, through: str, end: float = math.inf
    ) -> _FirstTokens:
        """Of as many requests as there is time for."""
        found = _FirstTokens([], [])
        for number in range(_FIRST_TOKENS + _UNCOUNTED):
            if time.monotonic() > end and found.through:
                break
            for url, times in ((direct, found.direct), (through, found.through)):
                began = time.perf_counter()
                body = {"model": MODEL, "prompt": f"first {number}", "stream": True, "max_tokens": 1}
                async with session.post(f"{url}/v1/completions", json=body) as answer:
                    await answer.content.readline()
                    times.append(time.perf_counter() - began)
                    await answer.read()
        skipped = min(_UNCOUNTED, len(found.through) - 1)  # They opened connections.
        return _FirstTokens(found.direct[skipped:], found.through[skipped:])


@dataclass(frozen=True)
class _FirstTokens:
    """Seconds to the first token, of requests sent in turn."""

    direct: list[float]
    through: list[float]


def _added(name: str, times: _FirstTokens) -> list[Figure]:
    """Differences of percentiles: under load two requests that follow each other have little in common."""
    found = []
    for percent, most in ((50, MAX_ADDED_P50_MS), (99, MAX_ADDED_P99_MS)):
        added = (percentile(times.through, percent) - percentile(times.direct, percent)) * 1e3
        note = _bar(added, most, at_least=False)
        found.append(Figure(name, f"added to the first token p{percent}", added, "ms", len(times.through), note))
    return found


def _bar(value: float, bar: float, *, at_least: bool) -> str:
    holds = value >= bar if at_least else value <= bar
    return f"{'held' if holds else 'missed'}: {'at least' if at_least else 'at most'} {bar:,g}"


@contextmanager
def everything_but(cores: tuple[int, ...]) -> Iterator[None]:
    """This process, and those that it starts, run on the other cores."""
    before = os.sched_getaffinity(0)
    rest = before - set(cores)
    if cores and (not rest or not set(cores) <= before):
        raise BenchError(
            f"--cores names {','.join(map(str, cores))}; this process may use {','.join(map(str, sorted(before)))}, and"
            " at least one must be left for the replicas and clients."
        )
    os.sched_setaffinity(0, rest)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _pin(pid: int, cores: set[int]) -> None:
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)


def cpu_s(pid: int) -> float:
    """CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@asynccontextmanager
async def _program(*arguments: str) -> AsyncIterator[tuple[str, int]]:
    """The URL and the process id of a process of this Python whose first line of output ends with its URL."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *arguments, stdout=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(_START_S):
            line = (await process.stdout.readline()).decode()
        if "http://" not in line:
            raise BenchError(f"{arguments[0]} did not start; see above.")
        yield line.split()[-1], process.pid
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _until_ready(url: str, num_replicas: int, num_gateways: int) -> None:
    """Every connection meets one of the gateways, so many are asked."""
    connector = aiohttp.TCPConnector(force_close=True)
    async with asyncio.timeout(_START_S), aiohttp.ClientSession(connector=connector) as session:
        num_ready = 0
        while num_ready < 8 * num_gateways:
            async with session.get(f"{url}/ready") as answer:
                is_ready = (await answer.json()).get("replicas", 0) >= num_replicas
            num_ready = num_ready + 1 if is_ready else 0
            if not is_ready:
                await asyncio.sleep(0.05)
