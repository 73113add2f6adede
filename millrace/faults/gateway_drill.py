"""A gateway over null replicas that are killed, stopped, slowed and corrupted: no lost stream, no wrong token.

Every replica is a process behind a `FaultyProxy`; the gateway is a process too. The answer to each prompt is known.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import aiohttp

from millrace.bench.errors import BenchError
from millrace.bench.gateway.null_replica import MODEL, answer_text
from millrace.faults.proxy import FaultyProxy

KINDS = ("kill", "stop", "drop", "corrupt", "silence", "delay")
START_S = 60.0
RECOVERY_LIMIT_S = 60.0
_NUM_REPLICAS = 3
_OUTPUT_TOKENS = 60
_TOKEN_MS = 10.0
_FAULT_S = (0.5, 3.0)
"""How long a replica stays stopped or its proxy faulty."""
_GATEWAY = ("--port", "0", "--policy", "least-tokens", "--probe-s", "0.2", "--probe-timeout-s", "1.5")
_QUICK_RETURN = ("--eject-s", "0.5", "--ramp-s", "1", "--stall-s", "3")


@dataclass
class DrillResult:
    num_faults: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    num_right: int = 0
    num_refused: int = 0
    """Answered with an error status: the client may send it again."""
    wrong: list[str] = field(default_factory=list)
    """Streams with a wrong, missing or repeated token, an error, or no end."""
    longest_gap_s: float = 0.0
    """Longest time that a stream stood still."""

    def failures(self) -> list[str]:
        found = [f"{len(self.wrong)} streams were lost or wrong, first {self.wrong[0]}"] if self.wrong else []
        if self.num_refused:
            found.append(f"{self.num_refused} requests were refused")
        if self.longest_gap_s > RECOVERY_LIMIT_S:
            found.append(f"a stream stood still for {self.longest_gap_s:.1f} s")
        return found


class _Program:
    """A process of this Python whose first line of output ends with its URL."""

    def __init__(self, *arguments: str) -> None:
        self._arguments = arguments
        self.process: asyncio.subprocess.Process | None = None
        self.url = ""

    async def start(self, *more: str) -> str:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", *self._arguments, *more, stdout=asyncio.subprocess.PIPE
        )
        assert self.process.stdout is not None
        async with asyncio.timeout(START_S):
            line = (await self.process.stdout.readline()).decode()
        if "http://" not in line:
            raise BenchError(f"{self._arguments[0]} did not start; see above.")
        self.url = line.split()[-1]
        return self.url

    def send(self, number: int) -> None:
        if self.process is not None and self.process.returncode is None:
            os.kill(self.process.pid, number)

    async def end(self) -> None:
        self.send(signal.SIGCONT)
        self.send(signal.SIGKILL)
        if self.process is not None:
            await self.process.wait()


@dataclass
class _Member:
    program: _Program
    proxy: FaultyProxy

    async def suffer(self, kind: str, draw: random.Random) -> None:
        """One fault, and its end."""
        if kind == "kill":
            await self.program.end()
            await self.program.start("--port", str(self.proxy.port))
            return
        if kind == "stop":
            self.program.send(signal.SIGSTOP)
        else:
            self.proxy.fault = kind  # type: ignore[assignment]
        await asyncio.sleep(draw.uniform(*_FAULT_S))
        self.proxy.fault = ""
        self.program.send(signal.SIGCONT)


async def drill(seconds: float, num_clients: int, seed: int, kinds: tuple[str, ...] = KINDS) -> DrillResult:
    """At least one fault of each kind, and faults until `seconds` have passed. One replica fails at a time."""
    result, draw = DrillResult(), random.Random(seed)
    async with AsyncExitStack() as stack:
        members = [await _member(stack) for _ in range(_NUM_REPLICAS)]
        urls = [await stack.enter_async_context(one.proxy.running()) for one in members]
        gateway = _Program("millrace", "gateway", "--replicas", ",".join(urls), *_GATEWAY, *_QUICK_RETURN)
        stack.push_async_callback(gateway.end)
        url = await gateway.start()
        timeout = aiohttp.ClientTimeout(total=None)
        session = await stack.enter_async_context(
            aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
        )
        await _until_open(session, url, _NUM_REPLICAS)
        is_over = asyncio.Event()
        clients = [asyncio.create_task(_client(session, url, number, is_over, result)) for number in range(num_clients)]
        end = time.monotonic() + seconds
        left = list(kinds)
        while left or time.monotonic() < end:
            kind = left.pop(0) if left else draw.choice(kinds)
            await draw.choice(members).suffer(kind, draw)
            result.num_faults[kind] += 1
            await _until_open(session, url, _NUM_REPLICAS)
        is_over.set()
        await asyncio.gather(*clients)
    return result


async def _member(stack: AsyncExitStack) -> _Member:
    program = _Program("millrace.bench.gateway.null_replica", "--token-ms", str(_TOKEN_MS))
    stack.push_async_callback(program.end)
    address = urlsplit(await program.start())
    return _Member(program, FaultyProxy(address.hostname or "", address.port or 0))


async def _until_open(session: aiohttp.ClientSession, url: str, count: int) -> None:
    """Until the gateway sends requests to all replicas again."""
    async with asyncio.timeout(START_S):
        while True:
            async with session.get(f"{url}/ready") as answer:
                body = await answer.json()
                if body.get("replicas", 0) >= count:
                    return
            await asyncio.sleep(0.05)


async def _client(
    session: aiohttp.ClientSession, url: str, number: int, is_over: asyncio.Event, result: DrillResult
) -> None:
    count = 0
    while not is_over.is_set():
        count += 1
        prompt = f"client {number}, request {count}"
        problem = await _stream(session, url, prompt, result)
        if problem == "refused":
            result.num_refused += 1
            await asyncio.sleep(0.2)
        elif problem:
            result.wrong.append(f"{prompt}: {problem}")
        else:
            result.num_right += 1


async def _stream(session: aiohttp.ClientSession, url: str, prompt: str, result: DrillResult) -> str:
    """What was wrong with one stream, or nothing."""
    body = {"model": MODEL, "prompt": prompt, "stream": True, "max_tokens": _OUTPUT_TOKENS}
    text, is_done, last = "", False, time.monotonic()
    try:
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            if answer.status != 200:
                return "refused"
            async for line in answer.content:
                now = time.monotonic()
                result.longest_gap_s = max(result.longest_gap_s, now - last)
                last = now
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        return f"error {event['error']}"
                    text += "".join(choice["text"] for choice in event["choices"])
                is_done = is_done or line.startswith(b"data: [DONE]")
    except (aiohttp.ClientError, OSError) as error:
        return f"cut off: {error!r}"
    expected = answer_text(prompt, _OUTPUT_TOKENS)
    if text != expected:
        return f"{text!r} instead of {expected!r}"
    return "" if is_done else "no end"
