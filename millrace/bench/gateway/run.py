"""What a gateway adds over null replicas: time to the first token, tokens per second."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from millrace.bench.errors import BenchError
from millrace.bench.figures import Figure, percentile
from millrace.bench.gateway.null_replica import MODEL

_START_S = 60.0
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

    async def run(self) -> list[Figure]:
        async with AsyncExitStack() as stack:
            arguments = ("millrace.bench.gateway.null_replica", "--token-ms", str(self.token_ms))
            urls = [(await stack.enter_async_context(_program(*arguments)))[0] for _ in range(self.num_replicas)]
            gateway, pid = await stack.enter_async_context(
                _program("millrace", "gateway", "--port", "0", "--replicas", ",".join(urls))
            )
            session = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
            await _until_ready(session, gateway, self.num_replicas)
            direct, through = await self._first_tokens(session, urls[0], gateway)
            rate, cpu_us = await self._rate(session, gateway, pid)
        added = [(after - before) * 1e3 for before, after in zip(direct, through, strict=True)]
        name = f"{self.num_replicas} replicas, {self.token_ms:g} ms per token"
        return [
            Figure(name, "first token direct p50", percentile(direct, 50) * 1e3, "ms", _FIRST_TOKENS),
            Figure(name, "added to the first token p50", percentile(added, 50), "ms", _FIRST_TOKENS),
            Figure(name, "added to the first token p99", percentile(added, 99), "ms", _FIRST_TOKENS),
            Figure(f"{name}, {self.num_streams} streams", "tokens/s", rate, "1/s"),
            Figure(f"{name}, {self.num_streams} streams", "CPU of the gateway per token", cpu_us, "µs"),
        ]

    async def _first_tokens(
        self, session: aiohttp.ClientSession, direct: str, through: str
    ) -> tuple[list[float], list[float]]:
        times: tuple[list[float], list[float]] = ([], [])
        for number in range(_FIRST_TOKENS + 20):
            for url, found in zip((direct, through), times, strict=True):
                began = time.perf_counter()
                body = {"model": MODEL, "prompt": f"first {number}", "stream": True, "max_tokens": 1}
                async with session.post(f"{url}/v1/completions", json=body) as answer:
                    await answer.content.readline()
                    found.append(time.perf_counter() - began)
                    await answer.read()
        return times[0][20:], times[1][20:]  # Without those that opened connections.

    async def _rate(self, session: aiohttp.ClientSession, url: str, pid: int) -> tuple[float, float]:
        """Tokens per second, and microseconds of the gateway's CPU per token."""
        num_frames, end = 0, time.perf_counter() + self.seconds

        async def client(number: int) -> None:
            nonlocal num_frames
            while time.perf_counter() < end:
                body = {"model": MODEL, "prompt": f"{number}", "stream": True, "max_tokens": self.num_tokens}
                async with session.post(f"{url}/v1/completions", json=body) as answer:
                    async for data in answer.content.iter_any():
                        num_frames += data.count(b"data: {")

        began, cpu_before = time.perf_counter(), _cpu_s(pid)
        await asyncio.gather(*(client(number) for number in range(self.num_streams)))
        return num_frames / (time.perf_counter() - began), (_cpu_s(pid) - cpu_before) / max(1, num_frames) * 1e6


def _cpu_s(pid: int) -> float:
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


async def _until_ready(session: aiohttp.ClientSession, url: str, count: int) -> None:
    async with asyncio.timeout(_START_S):
        while True:
            async with session.get(f"{url}/ready") as answer:
                if (await answer.json()).get("replicas", 0) >= count:
                    return
            await asyncio.sleep(0.05)
