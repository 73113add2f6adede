"""`millrace bench adapter-load`: many adapters with room for few."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench.test_bench_adapters import CONFIG

from millrace.bench.micro import adapter_load

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]


def test_more_adapters_than_room_and_a_stream_beside_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 1024}))
    sizes = {"NUM_ADAPTERS": 12, "ROOM": 2, "NUM_REQUESTS": 8, "OUTPUT_TOKENS": 4, "NUM_LOADED": 3, "STREAM_TOKENS": 12}
    monkeypatch.setattr(adapter_load, "NUM_ROUNDS", 2)
    for name, value in sizes.items():
        monkeypatch.setattr(adapter_load, name, value)
    settings = {"device": "cpu", "threads": 1, "kv_tokens": 1024}
    figures = list(adapter_load.adapter_figures(f"random:{tmp_path / 'config.json'}", settings, rounds=1))
    load = [figure for figure in figures if figure.workload.startswith("Zipf load")]
    assert [figure.metric for figure in load] == ["room for 2", "all on the device", "ratio"]
    assert load[2].value == pytest.approx(load[0].value / load[1].value)
    gaps = [figure.metric for figure in figures if figure.workload.startswith("Gap of a stream beside 3")]
    assert gaps == [
        *(f"{metric}, {when}" for when in ("while they are loaded", "once they are there") for metric in METRICS),
        "p99, added",
        "longest, added",
    ]


METRICS = ("p50", "p99", "longest")
