"""Parts of a running server are killed, again and again: every open stream must be told, and service must come back."""

from __future__ import annotations

import asyncio
import os
import signal
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from millrace.bench.http.target import BenchError
from millrace.bench.local_server import descendants
from millrace.faults.wire import Address, completion

Part = Literal["engine", "front"]
_WORDS: dict[Part, str] = {"engine": "millrace.engine.child", "front": "front_child"}
BACK_LIMIT_S = 120.0


@dataclass(slots=True)
class Kills:
    part: Part
    kills: int = 0
    whole: int = 0
    told: int = 0
    """Streams that ended with an error event."""
    cut: int = 0
    """Streams whose connection ended without a last event."""
    back_s: list[float] = field(default_factory=list)
    """From each kill until the server was ready again."""


async def kill_again_and_again(url: str, pid: int, part: Part, seconds: float, num_streams: int = 32) -> Kills:
    address, result = Address.of(url), Kills(part)
    end = time.monotonic() + seconds
    while time.monotonic() < end or result.kills == 0:
        streams = [asyncio.create_task(_stream(address, result)) for _ in range(num_streams)]
        await asyncio.sleep(1.5)
        os.kill(_child(pid, part), signal.SIGKILL)
        result.kills += 1
        back = asyncio.create_task(asyncio.to_thread(_await_back, url, pid, part))
        await asyncio.gather(*streams)
        result.back_s.append(await back)
    return result


def _child(pid: int, part: Part) -> int:
    for child in descendants(pid):
        try:
            if _WORDS[part] in Path(f"/proc/{child}/cmdline").read_text(errors="replace"):
                return child
        except OSError:
            continue
    raise BenchError(f"The server {pid} has no {part} process to kill; start it with --fronts 2.")


async def _stream(address: Address, result: Kills) -> None:
    try:
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(completion(address, max_tokens=200, ignore_eos=True))
        tail = b""
        while not tail.endswith(b"0\r\n\r\n"):
            piece = await reader.read(65536)
            if not piece:
                result.cut += 1
                return
            tail = (tail + piece)[-2000:]
        writer.close()
    except OSError:
        result.cut += 1
        return
    if b'"error":' in tail:
        result.told += 1
    else:
        result.whole += 1


def _await_back(url: str, pid: int, part: Part) -> float:
    """Seconds until the server is ready and has the part again."""
    began = time.monotonic()
    while time.monotonic() < began + BACK_LIMIT_S:
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=2) as answer:
                if answer.status == 200 and _child(pid, part):
                    return time.monotonic() - began
        except (urllib.error.URLError, OSError, BenchError):
            pass
        time.sleep(0.05)
    raise BenchError(f"The server was not ready {BACK_LIMIT_S:g} s after its {part} was killed.")
