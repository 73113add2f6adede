"""Servers that a benchmark starts end with it, however it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.served import wait_until

pytestmark = pytest.mark.live

_BENCHMARK = """
import sys, time
from millrace.bench import local_server
local_server._STOP_TIMEOUT_S = 1.0
with local_server.ServerProcess(["sh", "-c", f"trap '' TERM; touch {sys.argv[1]}; exec sleep 300"], 1) as server:
    print(server.pid, flush=True)
    time.sleep(300)
"""


@pytest.mark.parametrize("num_signals", [1, 2])
def test_a_benchmark_ended_by_sigterm_stops_its_servers(tmp_path: Path, num_signals: int) -> None:
    """`timeout` sends the signal twice; the second arrives while the server, which ignores it, is waited for."""
    is_deaf = tmp_path / "ignores-sigterm"
    command = [sys.executable, "-c", _BENCHMARK, str(is_deaf)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as benchmark:
        assert benchmark.stdout is not None
        server = int(benchmark.stdout.readline())
        try:
            wait_until(is_deaf.exists, "the server ignores SIGTERM")
            benchmark.send_signal(signal.SIGTERM)
            if num_signals == 2:
                wait_until(lambda: ignores_sigterm(benchmark.pid), "the benchmark stops its server")
                benchmark.send_signal(signal.SIGTERM)
            assert benchmark.wait(60) == 128 + signal.SIGTERM
            wait_until(lambda: not Path(f"/proc/{server}").exists(), "the server has ended")
        finally:
            if Path(f"/proc/{server}").exists():
                os.kill(server, signal.SIGKILL)


def ignores_sigterm(pid: int) -> bool:
    """Also true if it has ended."""
    found = re.search(r"^SigIgn:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return found is None or bool(int(found[1], 16) >> (signal.SIGTERM - 1) & 1)
