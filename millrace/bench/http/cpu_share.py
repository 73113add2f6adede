"""CPU use of engine, front and benchmark clients while a workload runs.

CPU time says what each costs; time in which its threads were runnable without a core says whether they compete.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from millrace.bench.figures import Figure
from millrace.bench.local_server import descendants

ENGINE, FRONT, SERVER, CLIENT = "engine", "front", "server", "clients"
_ENGINE_MODULE = b"millrace.supervise.engine_child"
_MIN_CONCURRENCY = 16
"""With fewer concurrent requests there are too few tokens for a figure per token."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Scheduler times in seconds, summed over threads."""

    ran_s: float = 0.0
    waited_s: float = 0.0
    """Time runnable without getting a core."""

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.ran_s + other.ran_s, self.waited_s + other.waited_s)

    def __sub__(self, other: Usage) -> Usage:
        return Usage(self.ran_s - other.ran_s, self.waited_s - other.waited_s)


def usage_of(pids: Iterable[int]) -> Usage:
    total = Usage()
    for pid in pids:
        for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            try:
                ran_ns, waited_ns, _ = file.read_text().split()
            except (OSError, ValueError):
                continue  # The thread has ended, or the kernel keeps no statistics.
            total += Usage(int(ran_ns) / 1e9, int(waited_ns) / 1e9)
    return total


def parts_of(pid: int) -> dict[str, list[int]]:
    """The processes of a server by role; those of a peer are one part."""
    family = [pid, *descendants(pid)]
    engines = [member for member in family if _ENGINE_MODULE in _command_line(member)]
    if not engines:
        return {SERVER: family, CLIENT: [os.getpid()]}
    below = {child for engine in engines for child in (engine, *descendants(engine))}
    return {
        ENGINE: sorted(below),
        FRONT: [member for member in family if member not in below],
        CLIENT: [os.getpid()],
    }


class CpuShare:
    """CPU use between construction and `figures`."""

    def __init__(self, pid: int) -> None:
        self._parts = parts_of(pid)
        self._before = {name: usage_of(pids) for name, pids in self._parts.items()}
        self._started = time.monotonic()

    def figures(self, workload: str, concurrency: int, output_tokens: int) -> list[Figure]:
        if concurrency < _MIN_CONCURRENCY or not output_tokens:
            return []
        wall_s = max(time.monotonic() - self._started, 1e-6)
        used = {name: usage_of(pids) - self._before[name] for name, pids in self._parts.items()}
        return list(share_figures(workload, used, output_tokens, wall_s))


def share_figures(workload: str, used: Mapping[str, Usage], output_tokens: int, wall_s: float) -> Iterable[Figure]:
    for name, usage in used.items():
        if usage.ran_s > 0:
            waited = 100 * usage.waited_s / (usage.ran_s + usage.waited_s)
            note = f"{100 * usage.ran_s / wall_s:.1f}% of a core; {waited:.0f}% of runnable time without a core"
            yield Figure(workload, f"{name} CPU", 1e6 * usage.ran_s / output_tokens, "µs/token", note=note)


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
