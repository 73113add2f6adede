"""Lets a process of long steps give way to those that somebody waits for."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

BACKGROUND_NICE = 10
"""About a tenth of the time of a busy core, and all of an idle one."""
AUTOGROUP = Path("/proc/self/autogroup")


def run_in_background(autogroup: Path = AUTOGROUP) -> None:
    """For all threads of this process, and those they start. Where the system does not allow it, nothing happens."""
    with contextlib.suppress(OSError):
        nicer = os.getpriority(os.PRIO_PROCESS, 0) + BACKGROUND_NICE
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(ProcessLookupError):  # It has ended.
                os.setpriority(os.PRIO_PROCESS, int(thread.name), nicer)
    # With autogroups, Linux shares the cores between sessions first, and each engine is a session of its own: `nice`
    # alone would only count among the threads of this engine.
    with contextlib.suppress(OSError):
        autogroup.write_text(str(BACKGROUND_NICE), encoding="ascii")
