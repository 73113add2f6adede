"""Short runs of what `millrace faults` does for minutes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from contract.test_generated_requests import CONFIG, write_model
from helpers.served import serving

from millrace.faults.disconnects import churn
from millrace.faults.fuzz import fuzz

pytestmark = [pytest.mark.live, pytest.mark.slow]


def test_mutated_requests_and_disconnects_break_and_leak_nothing(tmp_path: Path) -> None:
    options = write_model(tmp_path)
    # Large enough for the token ids and the prompts of the requests that are mutated.
    larger = {**CONFIG, "vocab_size": 4096, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(larger))
    with serving(*options, "--max-running", "16") as served:
        url = f"http://127.0.0.1:{served.port}"
        fuzzed = asyncio.run(fuzz(url, served.process.pid, 2.0, seed=7))
        assert fuzzed.faults == []
        assert sum(fuzzed.statuses.values()) == fuzzed.sent > 0
        assert min(fuzzed.statuses) >= 200
        assert max(fuzzed.statuses) < 500
        left = asyncio.run(churn(url, served.process.pid, 100, 2.0))
        assert left.abandoned > 0
        readings = left.readings
        assert readings is not None
        assert (readings.after.used_blocks, readings.after.requests) == (0, 0)
        assert readings.after.open_files <= readings.before.open_files + 4
        assert "Traceback" not in served.log
