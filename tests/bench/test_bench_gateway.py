"""`millrace bench gateway`, in small."""

from __future__ import annotations

import asyncio

import pytest

from millrace.bench.gateway.run import GatewayBench, policy_figures


@pytest.mark.live
def test_figures_of_a_small_run() -> None:
    figures = asyncio.run(GatewayBench(num_replicas=2, num_streams=4, num_tokens=4, seconds=0.1).run())
    assert [one.metric for one in figures][1:] == [
        "added to the first token p50",
        "added to the first token p99",
        "tokens/s",
    ]
    assert figures[-1].value > 0


def test_prefix_policy_finds_more_than_round_robin() -> None:
    figures = list(policy_figures(num_requests=1500))
    hits = {one.workload: one.value for one in figures if one.metric == "prompt tokens cached"}
    assert hits["prefix"] >= 1.3 * hits["round-robin"]
