"""Gateways over null replicas that are killed, stopped, slowed and corrupted: no lost stream, no wrong token.

Every replica is a process behind a `FaultyProxy`; there are two gateways with one store of limits. The answer to each
prompt is known. A gateway is killed, gets a full disk, and its wall clock jumps: clients of a killed one ask the other.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

import aiohttp

from millrace.bench.errors import BenchError
from millrace.bench.gateway.null_replica import MODEL, answer_text
from millrace.faults.pace import Pace
from millrace.faults.proxy import FaultyProxy
from millrace.serve.tenancy.keyring import DIGEST_PREFIX, digest_of

REPLICA_KINDS = ("kill", "stop", "drop", "corrupt", "silence", "delay")
GATEWAY_KINDS = ("kill-gateway", "full-disk", "clock")
KINDS = (*REPLICA_KINDS, *GATEWAY_KINDS)
START_S = 120.0
"""For a process to start, and for gateways to find every replica again."""
RECOVERY_LIMIT_S = 60.0
_NUM_REPLICAS = 3
_NUM_GATEWAYS = 2
_KEYS = """[tenants.drill]
keys = ["{digest}"]
max_concurrent = 100000
tokens_per_minute = 1000000000
operator = true
"""
_KEY = "the drill's key"
_OUTPUT_TOKENS = 60
_TOKEN_MS = 10.0
_FAULT_S = (0.5, 3.0)
"""How long a replica stays stopped or its proxy faulty."""
_GATEWAY = ("--policy", "least-tokens", "--probe-s", "0.2", "--probe-timeout-s", "1.5")
_QUICK_RETURN = ("--eject-s", "0.5", "--ramp-s", "1", "--stall-s", "3")


@dataclass
class DrillResult:
    num_faults: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    num_right: int = 0
    num_refused: int = 0
    """Answered with an error status: the client may send it again."""
    is_killing: bool = False
    """A gateway is being killed."""
    num_cut: int = 0
    """Streams that their gateway took along when it was killed; their clients asked the other one."""
    wrong: list[str] = field(default_factory=list)
    """Streams with a wrong, missing or repeated token, an error, or no end."""
    longest_gap_s: float = 0.0
    """Longest time that a stream stood still."""
    recovery_s: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    """From the beginning of each fault until both gateways sent requests to every replica again."""

    def table(self) -> list[tuple[str, ...]]:
        """By fault, then what the clients saw against its bar."""
        rows: list[tuple[str, ...]] = [("fault", "times", "all replicas serve again: median", "worst")]
        for kind, times in self.recovery_s.items():
            if times:
                median = sorted(times)[len(times) // 2]
                rows.append((kind, str(self.num_faults[kind]), f"{median:.1f} s", f"{max(times):.1f} s"))
        return rows

    def bars(self) -> list[tuple[str, ...]]:
        return [
            ("streams", "seen", "bar", ""),
            ("right", str(self.num_right), "> 0", _held(self.num_right > 0)),
            ("lost or wrong", str(len(self.wrong)), "0", _held(not self.wrong)),
            ("refused", str(self.num_refused), "0", _held(not self.num_refused)),
            ("sent again, as their gateway was killed", str(self.num_cut), "", ""),
            (
                *("longest gap", f"{self.longest_gap_s:.1f} s", f"{RECOVERY_LIMIT_S:g} s"),
                _held(self.longest_gap_s <= RECOVERY_LIMIT_S),
            ),
        ]

    def failures(self) -> list[str]:
        found = [f"{len(self.wrong)} streams were lost or wrong, first {self.wrong[0]}"] if self.wrong else []
        if self.num_refused:
            found.append(f"{self.num_refused} requests were refused")
        if self.longest_gap_s > RECOVERY_LIMIT_S:
            found.append(f"a stream stood still for {self.longest_gap_s:.1f} s")
        return found


def _held(holds: bool) -> str:
    return "held" if holds else "MISSED"


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


async def drill(
    seconds: float,
    num_clients: int,
    seed: int,
    kinds: tuple[str, ...] = KINDS,
    num_kills: int = 0,
    progress: Callable[[str], None] = lambda text: None,
    result: DrillResult | None = None,
) -> DrillResult:
    """At least one fault of each kind, until `seconds` have passed and there were `num_kills` kills of replicas. One
    replica or gateway fails at a time. Cancelled, it ends its processes first. `result`: is filled, for a caller that
    may be cancelled."""
    result, draw = DrillResult() if result is None else result, random.Random(seed)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="millrace-drill-")))
        (folder / "keys.toml").write_text(_KEYS.format(digest=DIGEST_PREFIX + digest_of(_KEY).hex()), encoding="utf-8")
        members = [await _member(stack) for _ in range(_NUM_REPLICAS)]
        urls = [await stack.enter_async_context(one.proxy.running()) for one in members]
        gateways = [await _gateway(stack, urls, folder, number) for number in range(_NUM_GATEWAYS)]
        session = await stack.enter_async_context(
            aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None),
                connector=aiohttp.TCPConnector(limit=0),
                headers={"Authorization": f"Bearer {_KEY}"},
            )
        )
        await _until_open(session, gateways)
        is_over = asyncio.Event()
        clients = [
            asyncio.create_task(_client(session, gateways, number, is_over, result)) for number in range(num_clients)
        ]
        stack.push_async_callback(_end, clients)
        pace = Pace(num_kills, progress)
        end = time.monotonic() + seconds
        left = list(kinds)
        while left or time.monotonic() < end or result.num_faults["kill"] < num_kills:
            is_time_left = time.monotonic() < end
            kind, began = left.pop(0) if left else draw.choice(kinds) if is_time_left else "kill", time.monotonic()
            if kind in GATEWAY_KINDS:
                await _disturb(draw.choice(gateways), kind, draw, result)
            else:
                await draw.choice(members).suffer(kind, draw)
            result.num_faults[kind] += 1
            await _until_open(session, gateways)
            result.recovery_s[kind].append(time.monotonic() - began)
            pace.done(result.num_faults["kill"])
        is_over.set()
        await asyncio.gather(*clients)
    return result


async def _member(stack: AsyncExitStack) -> _Member:
    program = _Program("millrace.bench.gateway.null_replica", "--token-ms", str(_TOKEN_MS))
    stack.push_async_callback(program.end)
    address = urlsplit(await program.start())
    return _Member(program, FaultyProxy(address.hostname or "", address.port or 0))


async def _end(clients: list[asyncio.Task[None]]) -> None:
    """Idempotent."""
    for one in clients:
        one.cancel()
    await asyncio.gather(*clients, return_exceptions=True)


async def _gateway(stack: AsyncExitStack, urls: list[str], folder: Path, number: int) -> _Program:
    shared = ("--keys-file", str(folder / "keys.toml"), "--limits-store", f"sqlite:{folder / 'limits.db'}")
    log = ("--decision-log", str(folder / f"routes-{number}.jsonl"))
    program = ("millrace.faults.skewed_clock", "gateway", "--replicas", ",".join(urls))
    gateway = _Program(*program, *_GATEWAY, *_QUICK_RETURN, *shared, *log)
    stack.push_async_callback(gateway.end)
    await gateway.start("--port", "0")
    return gateway


async def _disturb(gateway: _Program, kind: str, draw: random.Random, result: DrillResult) -> None:
    """One fault of a gateway, and its end."""
    assert gateway.process is not None
    if kind == "clock":
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            gateway.send(number)
            await asyncio.sleep(draw.uniform(*_FAULT_S) / 2)
    elif kind == "full-disk":  # No file can grow any more, as far as this process sees.
        limits = resource.prlimit(gateway.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(gateway.process.pid, resource.RLIMIT_FSIZE, (0, limits[1]))
        await asyncio.sleep(draw.uniform(*_FAULT_S))
        resource.prlimit(gateway.process.pid, resource.RLIMIT_FSIZE, limits)
    else:
        result.is_killing = True
        port = urlsplit(gateway.url).port
        await gateway.end()
        await gateway.start("--port", str(port))
        result.is_killing = False


async def _until_open(session: aiohttp.ClientSession, gateways: Sequence[_Program]) -> None:
    """Until every gateway sends requests to all replicas again, with limits that are shared."""
    try:
        async with asyncio.timeout(START_S):
            for gateway in gateways:
                while not await _is_open(session, gateway.url):
                    await asyncio.sleep(0.05)
    except TimeoutError:
        raise BenchError(f"A gateway did not find all its replicas within {START_S:g} s; see its log above.") from None


async def _is_open(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/ready") as answer:
            if (await answer.json()).get("replicas", 0) < _NUM_REPLICAS:
                return False
        async with session.get(f"{url}/v1/fleet") as answer:
            return bool((await answer.json())["limits"]["scope"] == "shared")
    except aiohttp.ClientError:
        return False


async def _client(
    session: aiohttp.ClientSession,
    gateways: Sequence[_Program],
    number: int,
    is_over: asyncio.Event,
    result: DrillResult,
) -> None:
    """Asks one gateway, and the next one when that is gone."""
    count, at = 0, number
    while not is_over.is_set():
        count += 1
        prompt = f"client {number}, request {count}"
        problem = await _stream(session, gateways[at % len(gateways)].url, prompt, result)
        if problem.startswith("cut off") and result.is_killing:
            result.num_cut += 1
            at += 1
            problem = await _stream(session, gateways[at % len(gateways)].url, prompt, result)
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
                is_done = is_done or line.startswith(b"data: [DONE]")
                event = json.loads(line[6:]) if line.startswith(b"data: {") else {"choices": ()}
                if "error" in event:
                    return f"error {event['error']}"
                text += "".join(choice["text"] for choice in event["choices"])
    except (aiohttp.ClientError, OSError) as error:
        return f"cut off: {error!r}"
    expected = answer_text(prompt, _OUTPUT_TOKENS)
    if text != expected:
        return f"{text!r} instead of {expected!r}"
    return "" if is_done else "no end"
