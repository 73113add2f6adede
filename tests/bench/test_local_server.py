"""Servers that a benchmark starts end with it, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

_BENCHMARK = """
import sys, time
from millrace.bench import local_server
local_server._STOP_TIMEOUT_S = 2.0
with local_server.ServerProcess(["sh", "-c", "trap '' TERM; exec sleep 300"], 1) as server:
    time.sleep(0.5)  # Until it ignores the signal.
    print(server.pid, flush=True)
    time.sleep(300)
"""


@pytest.mark.parametrize("num_signals", [1, 2])
def test_a_benchmark_ended_by_sigterm_stops_its_servers(num_signals: int) -> None:
    """`timeout` sends the signal twice; the second arrives while the server, which does not listen, is waited for."""
    with subprocess.Popen([sys.executable, "-c", _BENCHMARK], stdout=subprocess.PIPE, text=True) as benchmark:
        assert benchmark.stdout is not None
        server = int(benchmark.stdout.readline())
        try:
            for _ in range(num_signals):
                benchmark.send_signal(signal.SIGTERM)
                time.sleep(0.5)
            assert benchmark.wait(30) == 128 + signal.SIGTERM
            assert not _is_running(server)
        finally:
            if _is_running(server):
                os.kill(server, signal.SIGKILL)


def _is_running(pid: int, wait_s: float = 5.0) -> bool:
    """False as soon as the process is gone."""
    until = time.monotonic() + wait_s
    while time.monotonic() < until:
        if not Path(f"/proc/{pid}").exists():
            return False
        time.sleep(0.02)
    return True
