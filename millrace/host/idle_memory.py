"""Garbage collection in idle moments, and freed heap memory returned to the system.

Steps of many sizes fragment the heap: freed memory stays with the process while something above it is in use. On a
shared machine, other processes can use it while the engine is idle.
"""

from __future__ import annotations

import ctypes
import gc

IDLE_S = 5.0
"""Idle time before memory is returned; using it again costs page faults."""


def collect_young() -> None:
    """Collect the young generations now rather than during a step."""
    gc.collect(1)


class IdleCollector:
    """Idle-time collection for a process that is only an engine.

    The first call collects everything (150 ms) and freezes what survives; later calls scan only objects created since.
    `gc.get_freeze_count()` does not show whether that was done: it may start above zero."""

    def __init__(self) -> None:
        self._is_frozen = False

    def __call__(self) -> None:
        gc.collect()
        if not self._is_frozen:
            gc.freeze()
            self._is_frozen = True


def trim_heap() -> None:
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # Only glibc has it; other C libraries keep less memory.
        trim(0)
