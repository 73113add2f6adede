"""`millrace bench eviction` and `kv-tiers --trace` replay prefixes of a trace under every policy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from millrace.bench.errors import BenchError
from millrace.bench.micro.eviction import POLICIES, POOLS, eviction_figures, replay
from millrace.bench.micro.tiers import replay_tiers
from millrace.cli import main
from millrace.load.sources import read_trace


def written(path: Path, chains: list[list[int]]) -> Path:
    lines = [
        {"timestamp": 1000 * at, "input_length": 512 * max(1, len(ids)), "output_length": 8, "hash_ids": ids}
        for at, ids in enumerate(chains)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_what_a_policy_finds(tmp_path: Path) -> None:
    chains = [[0, 1, 10 + turn] for turn in range(30)]
    trace = written(tmp_path / "trace.jsonl", chains)
    for policy in POLICIES:
        done = replay(read_trace(trace), policy, 512 * 100)
        assert done.found == pytest.approx(29 * 2 / 90)
        assert 0 < done.saved <= done.found, "early blocks are the cheapest"
        assert done.evictions == 0
    figures = list(eviction_figures(trace))
    assert len(figures) == len(POLICIES) * len(POOLS)


def test_a_trace_without_prefixes_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BenchError, match="hash_ids"):
        list(eviction_figures(written(tmp_path / "trace.jsonl", [[], []])))
    assert main(["bench", "eviction"]) == 2
    assert "--trace" in capsys.readouterr().err


def test_what_a_disk_keeps(tmp_path: Path) -> None:
    """Twenty prompts of two blocks come three times, in turns: neither the device nor host memory has them still."""
    trace = read_trace(written(tmp_path / "trace.jsonl", [[2 * at, 2 * at + 1] for at in range(20)] * 3))
    small = {"device_tokens": 512 * 4, "host_tokens": 512 * 8}
    assert not any(replay_tiers(trace, "all", 0, **small).found.values())
    done = replay_tiers(trace, "all", 512 * 100, **small)
    assert done.found == {"device": 0, "host": 0, "disk": pytest.approx(2 / 3)}
    assert done.written == pytest.approx(1 / 3)
    later = replay_tiers(trace, "second use", 512 * 100, **small)
    assert later.found["disk"] == pytest.approx(1 / 3)
    assert later.written == pytest.approx(1 / 3)
