"""`millrace bench kv-tiers` on three real servers of a tiny model, which computes faster than a disk reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.tiny_models import config_of, make_reference

from millrace.bench.kv_tiers import LOCATIONS, KvTiersBench

pytestmark = pytest.mark.live


def test_tiers_find_more_than_the_device(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**config_of(make_reference("llama")), "vocab_size": 1024}))
    settings = (f"random:{config}", "--device", "cpu", "--dtype", "float32")
    bench = KvTiersBench(settings, 24, pool_tokens=256, prompt_tokens=32, host_gib=0.001, disk_gib=0.05)
    figures = {(one.workload, one.metric): one.value for one in bench.run(lambda *_: None, tmp_path / "plot.svg")}
    modes = ("off", "host", "host and disk")
    found = {mode: sum(figures[mode, f"found: {place}"] for place in LOCATIONS) for mode in modes}
    assert 0 < found["off"] < found["host and disk"]
    assert figures["off", "found: host"] == figures["host", "found: disk"] == 0
    assert figures["host", "found: host"] > 0
    assert all(0 < figures[mode, "TTFT p50"] <= figures[mode, "TTFT p99"] for mode in modes)
    assert (tmp_path / "plot.svg").read_text().startswith("<svg")
