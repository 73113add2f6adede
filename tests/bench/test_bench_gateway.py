"""`millrace bench gateway`, in small."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from helpers.tiny_server import tiny_source

from millrace.bench.errors import BenchError
from millrace.bench.gateway.fetch import fetch_figures
from millrace.bench.gateway.keys import MIN_SHARE, NO_KEYS, OWN, SHARED, KeysBench, keys_file
from millrace.bench.gateway.policies import (
    BALANCE,
    CACHED_TOKENS,
    FIRST_P99,
    HITS,
    PROMPT_TOKENS_PER_S,
    conversations,
    plot,
    policy_figures,
    read_trace,
)
from millrace.bench.gateway.run import GatewayBench
from millrace.cli import main
from millrace.serve.tenancy.keyring import Keyring


@pytest.mark.live
@pytest.mark.alone
def test_figures_of_a_small_run() -> None:
    figures = asyncio.run(GatewayBench(2, num_streams=4, num_tokens=4, seconds=1.0, num_gateways=2).run())
    added = ["added to the first token p50", "added to the first token p99"]
    assert [one.metric for one in figures] == [
        *("first token direct p50", *added),
        *("tokens/s", "CPU of the gateway per token", "open streams", *added),
    ]
    by_name = {one.metric: one for one in figures}
    assert by_name["tokens/s"].value > 0
    assert by_name["open streams"].note == "missed: at least 2,048"
    assert "2 gateways" in by_name["tokens/s"].workload


@pytest.mark.live
@pytest.mark.alone
def test_keys_are_compared_with_none_in_turns() -> None:
    bench = GatewayBench(1, num_streams=2, num_tokens=4, seconds=0.5)
    figures = asyncio.run(KeysBench(bench, rounds=1).run())
    by_name = {name: [one for one in figures if one.workload.startswith(name)] for name in (NO_KEYS, OWN + ",", SHARED)}
    assert [len(found) for found in by_name.values()] == [3, 6, 6]
    assert all(one.value > 0 for one in figures if one.metric == "tokens/s")
    share = next(one for one in by_name[SHARED] if one.metric.startswith("tokens/s, share"))
    assert share.note.startswith("held" if share.value >= MIN_SHARE else "missed")


def test_a_keys_file_of_the_bench_has_a_tenant_for_each_key(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(keys_file(["one", "other"]), encoding="utf-8")
    keyring = Keyring(file)
    assert [keyring.tenant_of(key).name for key in ("one", "other")] == ["tenant-0", "tenant-1"]


@pytest.mark.parametrize("told", [["front", "--keys"], ["gateway", "--rounds", "3"]])
def test_keys_and_their_rounds_are_for_the_gateway(told: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *told]) == 2
    assert "bench gateway" in capsys.readouterr().err


def test_cores_that_leave_none_for_the_rest_are_refused() -> None:
    cores = tuple(os.sched_getaffinity(0))
    with pytest.raises(BenchError, match="at least one must be left"):
        asyncio.run(GatewayBench(cores=cores).run())
    assert os.sched_getaffinity(0) == set(cores)


def test_prefix_policy_finds_more_than_round_robin() -> None:
    figures = list(policy_figures(conversations(4, 1500), CACHED_TOKENS, PROMPT_TOKENS_PER_S))
    by_metric = {
        metric: {one.workload: one.value for one in figures if one.metric == metric}
        for metric in (HITS, FIRST_P99, BALANCE)
    }
    assert by_metric[HITS]["prefix"] >= 1.3 * by_metric[HITS]["round-robin"]
    assert by_metric[FIRST_P99]["prefix"] <= by_metric[FIRST_P99]["round-robin"]
    drawn = plot(figures, "policies & caches")
    assert drawn.startswith("<svg")
    assert "policies &amp; caches" in drawn
    assert drawn.count("<rect") == 1 + 2 * len(by_metric[HITS])


def test_trace_of_mooncake_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    line = '{"timestamp": 1500, "input_length": 1100, "output_length": 7, "hash_ids": [5, 6]}\n'
    path.write_text(line * 2)
    first, second = read_trace(path, 3)
    assert (first.at, first.asked.prompt_tokens, len(first.asked.chain)) == (1.5, 1100, 16)
    assert first.asked.chain == second.asked.chain
    path.write_text("{}")
    with pytest.raises(BenchError, match="trace.jsonl"):
        read_trace(path, 3)


@pytest.mark.live
@pytest.mark.alone
def test_a_prompt_is_fetched_and_computed(tmp_path: Path) -> None:
    options = (tiny_source(tmp_path), "--dtype", "float32", "--kv-tokens", "8192")
    figures = asyncio.run(fetch_figures(options, 700, 1))
    assert [one.unit for one in figures] == ["ms", "ms", "×"]
    assert figures[0].value > 0
    assert figures[0].note.startswith(("1 × fetched", "1 × slower")), figures[0].note
