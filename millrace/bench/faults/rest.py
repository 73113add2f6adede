"""What a server holds at rest: blocks, requests, memory, open files. Compared before and after, it shows leaks."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from millrace.bench.faults.wire import metrics
from millrace.bench.local_server import descendants, resident_mib

SETTLE_S = 60.0
QUIET_S = 7.0
"""Longer than the engine waits before it gives memory back (`engine/idle_memory.py`)."""


@dataclass(frozen=True, slots=True)
class AtRest:
    used_blocks: float
    requests: float
    memory_mib: float
    open_files: int


def at_rest(url: str, pid: int, like: AtRest | None = None) -> AtRest:
    """Waits, for a bounded time, until nothing runs and no more files are open than in `like`; whatever is still held
    then is what leaked."""
    end = time.monotonic() + SETTLE_S
    while True:
        page = metrics(url)
        requests = (
            page["millrace_running_requests"] + page["millrace_waiting_requests"] + page["millrace_open_requests"]
        )
        used = page['millrace_kv_blocks{state="used"}']
        if (requests == 0 and used == 0) or time.monotonic() > end:
            break
        time.sleep(0.5)
    if not pid:
        return AtRest(used, requests, 0.0, 0)
    time.sleep(QUIET_S)
    open_files = _settled_files(pid, like.open_files if like is not None else 0)
    return AtRest(used, requests, resident_mib(pid), open_files)


def _settled_files(pid: int, expected: int) -> int:
    """The last sockets take a moment to close: a connection whose request broke off is kept for ten seconds."""
    end = time.monotonic() + (SETTLE_S if expected else 0.0)
    while (count := _open_files(pid)) > expected and time.monotonic() < end:
        time.sleep(1.0)
    return count


def _open_files(pid: int) -> int:
    return sum(len(os.listdir(f"/proc/{process}/fd")) for process in [pid, *descendants(pid)])
