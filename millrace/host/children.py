"""The end of child processes."""

from __future__ import annotations

import logging
import subprocess

log = logging.getLogger(__name__)

EXIT_LIMIT_S = 5.0
"""From a signal that cannot be ignored, or from the end of a process's connections, to the end of the process."""


def end_of(process: subprocess.Popen[bytes], name: str) -> int | None:
    """The exit code of a process that is about to end. None if it has not ended in time, which is logged: nobody can
    end one that is stuck in the kernel, so nobody waits for it."""
    try:
        return process.wait(EXIT_LIMIT_S)
    except subprocess.TimeoutExpired:
        log.warning("the process of %s (pid %d) has not ended within %g s", name, process.pid, EXIT_LIMIT_S)
        return None
