"""How fast this processor reads memory and multiplies matrices: measured at the first starts, then read from a file.

A busy machine measures too little. The best of all measurements is kept, and starts measure until `MAX_TRIES` of them
found the machine idle, or `MAX_BUSY_TRIES` found it busy.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from millrace.config import cache_dir

MAX_TRIES = 4
MAX_BUSY_TRIES = 16
"""The best of so many is near the limit, and a machine that is always busy would measure at every start."""
IDLE_LOAD = 0.5
"""Processes that wait for a core, per core, on an idle machine (average of the last minute)."""
READ_BYTES = 1 << 27
SIZE = 1024
RUNS = 3
MAX_S = 0.05
"""No further run starts after this time: a start waits for the measurement."""


@dataclass(frozen=True, slots=True)
class ProcessorLimits:
    bytes_per_s: float = 0.0
    flops: float = 0.0
    num_idle_tries: int = 0
    num_busy_tries: int = 0


def processor_limits(dtype: torch.dtype) -> ProcessorLimits:
    """With the threads that torch uses now. A file that cannot be written costs a fraction of a second per start."""
    path, key = cache_dir() / "processor_limits.json", _key(dtype)
    known = _read(path)
    found = known.get(key, ProcessorLimits())
    if found.num_idle_tries < MAX_TRIES and found.num_busy_tries < MAX_BUSY_TRIES:
        measured, is_idle = measure(dtype), _is_idle()
        found = ProcessorLimits(
            max(found.bytes_per_s, measured.bytes_per_s),
            max(found.flops, measured.flops),
            found.num_idle_tries + is_idle,
            found.num_busy_tries + (not is_idle),
        )
        _write(path, {**known, key: found})
    return found


def _is_idle() -> bool:
    return os.getloadavg()[0] < IDLE_LOAD * (os.cpu_count() or 1)


def _key(dtype: torch.dtype) -> str:
    return f"{_processor_name()}, {torch.get_num_threads()} threads, {dtype}"


def _processor_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def measure(dtype: torch.dtype) -> ProcessorLimits:
    data = torch.ones(READ_BYTES // 4)
    read_s = _best_s(data.sum)
    # Without instructions for 16 bits, torch multiplies them more slowly than float32, and our kernels do not.
    product_s = min(_product_s(one) for one in {dtype, torch.float32})
    return ProcessorLimits(READ_BYTES / read_s, 2 * SIZE**3 / product_s)


def _product_s(dtype: torch.dtype) -> float:
    matrix = torch.ones(SIZE, SIZE, dtype=dtype)
    return _best_s(lambda: matrix @ matrix)


def _best_s(work: Callable[[], object]) -> float:
    """The shortest of up to `RUNS` runs."""
    first = last = time.perf_counter()
    best = float("inf")
    for _ in range(RUNS):
        began = last
        work()
        last = time.perf_counter()
        best = min(best, last - began)
        if last - first > MAX_S:
            break
    return best


def _read(path: Path) -> dict[str, ProcessorLimits]:
    try:
        return {key: ProcessorLimits(**one) for key, one in json.loads(path.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write(path: Path, known: dict[str, ProcessorLimits]) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    records = {key: asdict(one) for key, one in known.items()}
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(records), encoding="utf-8")
        partial.replace(path)
