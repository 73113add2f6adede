"""Leak detection: what an idle server holds (KV blocks, requests, memory, open files) before and after a load.

Memory grows at first even without a leak: KV pages become resident, recent requests are remembered, the heap
fragments. A leak keeps growing. Each run therefore has a warm-up and two halves, and only the growth of the second half
counts.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from millrace.bench.local_server import descendants, resident_mib
from millrace.bench.metrics_page import scrape

SETTLE_S = 60.0
QUIET_S = 7.0
"""Longer than the engine waits before it returns memory to the system (`host/idle_memory.py`)."""
FILES_SETTLE_S = 30.0
FEW_FILES = 2
"""Slack for files that are opened once and kept, such as a tenant's counters."""
LONG_RUN_S = 20.0
"""Shorter runs say nothing about memory."""
WARM_UP_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class IdleReading:
    used_blocks: float
    requests: float
    memory_mib: float
    open_files: int


@dataclass(frozen=True, slots=True)
class IdleReadings:
    """Readings after the warm-up, after the first half and after the second half."""

    before: IdleReading
    half: IdleReading
    after: IdleReading


async def readings_around(
    url: str, pid: int, seconds: float, work: Callable[[float, bool], Awaitable[None]]
) -> IdleReadings:
    """Take readings around `work(seconds, is_counted)`, which is not counted during the warm-up."""
    quiet_s = QUIET_S if seconds >= LONG_RUN_S else 0.0
    await work(max(seconds * WARM_UP_SHARE, min(15.0, seconds / 2)), False)
    before = await asyncio.to_thread(read_idle, url, pid, quiet_s)
    await work(seconds / 2, True)
    half = await asyncio.to_thread(read_idle, url, pid, quiet_s, before)
    await work(seconds / 2, True)
    return IdleReadings(before, half, await asyncio.to_thread(read_idle, url, pid, quiet_s, before))


def read_idle(url: str, pid: int, quiet_s: float = 0.0, like: IdleReading | None = None) -> IdleReading:
    """Wait, up to a limit, until no request is left and no more files are open than in `like`. What is still held
    then has leaked."""
    end = time.monotonic() + SETTLE_S
    while True:
        page = _scrape_until(url, end)
        requests = (
            page["millrace_running_requests"] + page["millrace_waiting_requests"] + page["millrace_open_requests"]
        )
        used = page['millrace_kv_blocks{state="used"}']
        if (requests == 0 and used == 0) or time.monotonic() > end:
            break
        time.sleep(0.5)
    if not pid:
        return IdleReading(used, requests, 0.0, 0)
    time.sleep(quiet_s)
    open_files = _count_files(pid, like.open_files if like is not None else 0)
    return IdleReading(used, requests, resident_mib(pid), open_files)


def _scrape_until(url: str, end: float) -> dict[str, float]:
    """A front that still cleans up after many disconnects may not answer a scrape in time."""
    while True:
        try:
            return scrape(url, timeout_s=10.0)
        except OSError:
            if time.monotonic() > end:
                raise


def _count_files(pid: int, expected: int) -> int:
    """Sockets take a moment to close: a connection with a broken-off request is kept for ten seconds."""
    end = time.monotonic() + (FILES_SETTLE_S if expected else 0.0)
    while (count := _open_files(pid)) > expected + FEW_FILES and time.monotonic() < end:
        time.sleep(1.0)
    return count


def _open_files(pid: int) -> int:
    return sum(len(os.listdir(f"/proc/{process}/fd")) for process in [pid, *descendants(pid)])
