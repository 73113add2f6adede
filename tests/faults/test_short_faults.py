"""Short runs of what `millrace faults` does for minutes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from helpers.served import serving
from helpers.tiny_server import tiny_options

from millrace.faults.disconnects import churn
from millrace.faults.fuzz import fuzz

pytestmark = pytest.mark.live


def test_mutated_requests_and_disconnects_break_and_leak_nothing(tmp_path: Path) -> None:
    with serving(*tiny_options(tmp_path), "--max-context", "512", "--max-running", "16") as served:
        url = f"http://127.0.0.1:{served.port}"
        fuzzed = asyncio.run(fuzz(url, served.process.pid, 1.5, seed=7))
        assert fuzzed.faults == []
        assert sum(fuzzed.statuses.values()) == fuzzed.sent > 0
        assert min(fuzzed.statuses) >= 200
        assert max(fuzzed.statuses) < 500
        left = asyncio.run(churn(url, served.process.pid, 100, 1.0))
        assert left.abandoned > 0
        readings = left.readings
        assert readings is not None
        assert (readings.after.used_blocks, readings.after.requests) == (0, 0)
        assert readings.after.open_files <= readings.before.open_files + 4
        assert "Traceback" not in served.log
