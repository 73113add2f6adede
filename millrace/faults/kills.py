"""Kills processes of a running server repeatedly: it must recover, and streams must go on with the next engine, to the
same text."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from millrace.bench.errors import BenchError
from millrace.bench.local_server import descendants
from millrace.faults.pace import Pace
from millrace.faults.wire import Address, completion, exchange
from millrace.supervise.engine_supervisor import STABLE_S

Part = Literal["engine", "front", "rank"]
PARTS: dict[str, Part] = {"kill-engine": "engine", "kill-front": "front", "kill-rank": "rank"}
"""By name of the fault."""
_MODULES: dict[Part, str] = {
    "engine": "millrace.supervise.engine_child",
    "front": "millrace.supervise.front_child",
    "rank": "millrace.engine.ranks.rank_child",
}
RECOVERY_LIMIT_S = 120.0
STREAM_LIMIT_S = 300.0
BEFORE_KILL_S = 1.5
"""From the start of streams to the kill."""


BURST = 5
"""Kills of an engine in a row. A server gives up an engine that dies more often without serving well in between, and
waits longer after each death, so the drill lets it serve then."""
REST_S = STABLE_S + 1.0


@dataclass(slots=True)
class KillResult:
    part: Part
    kills: int = 0
    completed: int = 0
    failed: int = 0
    """Streams that ended with an error event."""
    refused: int = 0
    """Requests answered with an error status: their engine was killed before the first token."""
    cut: int = 0
    """Answers that the end of the connection, or STREAM_LIMIT_S, cut off."""
    wrong: int = 0
    """Whole answers with another text than before the first kill."""
    recovery_s: list[float] = field(default_factory=list)
    """From each kill until the server was ready again."""


def shortest_s(part: Part, num_kills: int) -> float:
    """How long so many kills take at least."""
    rests = 0 if part == "front" else (max(1, num_kills) - 1) // BURST
    return rests * REST_S + num_kills * BEFORE_KILL_S


async def kill_repeatedly(
    url: str,
    pid: int,
    part: Part,
    seconds: float,
    num_kills: int = 0,
    num_streams: int = 32,
    progress: Callable[[str], None] = lambda text: None,
    result: KillResult | None = None,
) -> KillResult:
    """Kill this many times, or at least once and until the time is over. After every BURST kills of an engine the
    server serves for a while before the next one. `result`: is filled, for a caller that may be cancelled. The server
    is deterministic: each answer is compared with that of the same stream before the first kill."""
    address, pace = Address.of(url), Pace(num_kills, progress)
    result = KillResult(part) if result is None else result
    texts = await asyncio.gather(*(text_once(address, number) for number in range(num_streams)))
    end = time.monotonic() + seconds
    while result.kills < num_kills if num_kills else time.monotonic() < end or result.kills == 0:
        if part != "front" and result.kills and result.kills % BURST == 0:
            await asyncio.sleep(REST_S)
        streams = [asyncio.create_task(stream_once(address, result, number, text)) for number, text in enumerate(texts)]
        await asyncio.sleep(BEFORE_KILL_S)
        os.kill(child_of(pid, part), signal.SIGKILL)
        result.kills += 1
        recovery = asyncio.create_task(asyncio.to_thread(await_recovery, url, pid, part))
        await asyncio.gather(*streams)
        result.recovery_s.append(await recovery)
        pace.done(result.kills)
    return result


def child_of(pid: int, part: Part) -> int:
    for child in descendants(pid):
        try:
            if _MODULES[part] in Path(f"/proc/{child}/cmdline").read_text(errors="replace"):
                return child
        except OSError:
            continue
    raise BenchError(f"Server {pid} has no {part} process to kill. Start it with --fronts 2.")


async def text_once(address: Address, number: int) -> str:
    status, body = await exchange(address, _request(address, number), STREAM_LIMIT_S)
    if status != 200 or b'"error":' in body[-2000:]:
        raise BenchError(f"The server answered {status} before anything was killed: {body[-300:]!r}")
    return _text_of(body)


async def stream_once(address: Address, result: KillResult, number: int, expected: str) -> None:
    try:
        status, body = await exchange(address, _request(address, number), STREAM_LIMIT_S)
    except (OSError, asyncio.IncompleteReadError):  # TimeoutError is an OSError.
        result.cut += 1
        return
    if status == 0:
        result.cut += 1
    elif status != 200:
        result.refused += 1
    elif b'"error":' in body[-2000:]:
        result.failed += 1
    elif _text_of(body) != expected:
        result.wrong += 1
    else:
        result.completed += 1


def _request(address: Address, number: int) -> bytes:
    prompt = f"Story {number}. Once upon a time"
    return completion(address, prompt=prompt, max_tokens=200, ignore_eos=True, temperature=0)


def _text_of(body: bytes) -> str:
    lines = (line[6:] for line in body.splitlines() if line.startswith(b"data: {"))
    return "".join(choice["text"] for line in lines for choice in json.loads(line).get("choices", ()))


def await_recovery(url: str, pid: int, part: Part) -> float:
    """Seconds until the server is ready and the killed process has been replaced."""
    began = time.monotonic()
    while time.monotonic() < began + RECOVERY_LIMIT_S:
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=2) as answer:
                if answer.status == 200 and child_of(pid, part):
                    return time.monotonic() - began
        except (urllib.error.URLError, OSError, BenchError):
            pass
        time.sleep(0.05)
    raise BenchError(f"The server was not ready {RECOVERY_LIMIT_S:g} s after its {part} was killed.")
