"""How fast this machine reads memory: the best of several short tries.

Other processes can only make a try slower. A try is shorter than the time slices that they get, and tries are some
milliseconds apart, so that even on a busy machine one of them is likely to run undisturbed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from millrace.host.cores import usable_cores

PROBE_BYTES = 64 << 20
"""Read in each try, by all threads together: more than most caches hold."""
MAX_THREADS = 8
"""So many cores use up the memory bandwidth of most machines."""
NUM_TRIES = 16
PAUSE_S = 0.01
"""Between two tries."""
LIMIT_S = 0.4
"""No further try begins after this time."""


def memory_bytes_per_s() -> float:
    """Bytes that all cores together read from memory per second. Takes at most about half a second."""
    import numpy as np

    parts = np.array_split(np.ones(PROBE_BYTES // 8, np.int64), min(usable_cores(), MAX_THREADS))
    with ThreadPoolExecutor(len(parts)) as threads:

        def read() -> None:
            for _ in threads.map(np.add.reduce, parts):  # NumPy lets other threads run meanwhile.
                pass

        return PROBE_BYTES / shortest_s(read)


def shortest_s(
    work: Callable[[], None],
    *,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> float:
    """The shortest of up to `NUM_TRIES` runs of `work`; at least one."""
    first = clock()
    best = float("inf")
    for _ in range(NUM_TRIES):
        began = clock()
        work()
        ended = clock()
        best = min(best, ended - began)
        if ended - first > LIMIT_S:
            break
        sleep(PAUSE_S)
    return best
