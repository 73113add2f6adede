"""What a gateway adds over null replicas: time to the first token, tokens per second; and hit rates per policy."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec

from millrace.bench.errors import BenchError
from millrace.bench.figures import Figure, percentile
from millrace.bench.gateway.null_replica import MODEL
from millrace.gateway.routing.candidates import CHUNK_TOKENS, Asked, Candidate, Choice, Moment
from millrace.gateway.routing.decisions import Decision
from millrace.gateway.routing.policies import POLICIES
from millrace.gateway.routing.replay import replay

CACHED_TOKENS = 160_000
"""Prompt tokens that a replica keeps, for made-up conversations."""
TRACE_CACHED_TOKENS = 2_000_000
_TRACE_BLOCK = 512
_OUTPUT_S, _PROMPT_S = 0.008, 1 / 5000
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
        name = f"{self.num_replicas} replicas"
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


# ── hit rates ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def conversations(num_replicas: int, num_requests: int, seed: int = 0) -> list[Decision]:
    """Made-up traffic: conversations of several turns that begin with one of a few system prompts. Each turn sends all
    that was said before."""
    draw, found = random.Random(seed), []
    open_ones: list[list[str]] = []
    candidates = tuple(Candidate(f"r{number}") for number in range(num_replicas))
    now = 0.0
    for number in range(num_requests):
        now += draw.expovariate(40.0)
        if len(open_ones) < 60 or draw.random() < 0.15:
            system = draw.choices(range(8), weights=[1 / (rank + 1) for rank in range(8)])[0]
            open_ones.append([f"system {system} {chunk}" for chunk in range(24)])
        chain = draw.choice(open_ones)
        chain += [f"turn {number} {chunk}" for chunk in range(draw.randint(1, 12))]
        asked = Asked(f"{number}", MODEL, len(chain) * CHUNK_TOKENS, draw.randint(16, 256), tuple(chain))
        moment = Moment(number, draw.random())
        found.append(Decision(now, "", asked, moment, candidates, Choice("", "")))
        if len(chain) > 160:
            open_ones.remove(chain)
    return found


class _TraceLine(msgspec.Struct):
    """A line of Mooncake's published traces."""

    timestamp: float
    """Milliseconds."""
    input_length: int
    output_length: int
    hash_ids: list[int]
    """One per 512 tokens; equal ids mean an equal prefix."""


def read_trace(path: Path, num_replicas: int) -> list[Decision]:
    candidates = tuple(Candidate(f"r{number}") for number in range(num_replicas))
    draw, found = random.Random(0), []
    per_id = _TRACE_BLOCK // CHUNK_TOKENS
    try:
        lines = [msgspec.json.decode(line, type=_TraceLine) for line in path.read_bytes().splitlines()]
    except OSError as error:
        raise BenchError(f"Cannot read {path}: {error.strerror}.") from error
    except msgspec.DecodeError as error:
        raise BenchError(f"{path} is not a trace of Mooncake's form: {error}") from error
    for number, line in enumerate(lines):
        chain = tuple(f"{one}.{part}" for one in line.hash_ids for part in range(per_id))
        asked = Asked(f"{number}", MODEL, line.input_length, line.output_length, chain)
        found.append(
            Decision(line.timestamp / 1e3, "", asked, Moment(number, draw.random()), candidates, Choice("", ""))
        )
    return found


def policy_figures(decisions: list[Decision], cached_tokens: int) -> Iterator[Figure]:
    """Each policy on the same traffic. A replica keeps `cached_tokens` of prompts, computes 5,000 prompt tokens per
    second and takes 8 ms per token of output."""
    lasted = {
        one.asked.id: one.asked.output_tokens * _OUTPUT_S + one.asked.prompt_tokens * _PROMPT_S for one in decisions
    }
    for policy in POLICIES:
        if policy in ("session", "model", "nearest"):  # This traffic names no sessions, models or regions.
            continue
        result = replay(decisions, lasted, policy, cached_tokens // CHUNK_TOKENS)
        yield Figure(policy, "prompt tokens cached", 100 * result.hit_rate, "%", result.num_requests)
        yield Figure(policy, "busiest replica over mean", result.balance, "×", result.num_requests)
