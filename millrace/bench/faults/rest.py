"""What a server holds at rest: blocks, requests, memory, open files. Compared before and after, it shows leaks."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from millrace.bench.faults.wire import metrics
from millrace.bench.local_server import descendants, resident_mib

SETTLE_S = 60.0
SAME_IN_A_ROW = 3


@dataclass(frozen=True, slots=True)
class AtRest:
    used_blocks: float
    requests: float
    memory_mib: float
    open_files: int


def at_rest(url: str, pid: int) -> AtRest:
    """Waits, for a bounded time, until nothing runs; whatever is still held then is what leaked."""
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
    open_files = _settled_files(pid) if pid else 0
    return AtRest(used, requests, resident_mib(pid) if pid else 0.0, open_files)


def _settled_files(pid: int) -> int:
    """Once their number has stopped falling: the last sockets take a moment to close."""
    end, seen = time.monotonic() + SETTLE_S, [_open_files(pid)]
    while time.monotonic() < end and not (len(seen) > SAME_IN_A_ROW and seen[-1] >= min(seen[-SAME_IN_A_ROW - 1 : -1])):
        time.sleep(1.0)
        seen.append(_open_files(pid))
    return min(seen)


def _open_files(pid: int) -> int:
    return sum(len(os.listdir(f"/proc/{process}/fd")) for process in [pid, *descendants(pid)])
