from __future__ import annotations

import math
import urllib.request
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.bench.http.observing import Round, SpanReceiver, ratio_of, server_cpu_per_token
from millrace.bench.http.serving import ServingFigures
from millrace.commands.benchmarks import bench_observe
from millrace.config import Config, MemoryConfig


def figures(tokens_per_s: float, engine_cores: float) -> ServingFigures:
    names: dict[str, Any] = dict.fromkeys(ServingFigures.__dataclass_fields__, 0.0)
    names |= {"output_tokens_per_s": tokens_per_s, "hot": {}, "first_error": ""}
    return ServingFigures(**(names | {"cores": {"engine": engine_cores, "front 0": 0.5, "clients": 3.0}}))


def test_the_ratio_is_paired_by_round() -> None:
    """Phases of a machine ten times as slow do not widen the interval: each round is compared with itself."""
    rounds = [Round(figures(speed, 1.0), figures(0.98 * speed, 1.0)) for speed in (1000.0, 100.0, 500.0)]
    found = ratio_of(rounds, lambda one: one.output_tokens_per_s)
    assert (found.value, found.low, found.high) == pytest.approx((0.98, 0.98, 0.98))
    noisy = [*rounds, Round(rounds[0].off, replace(rounds[0].on, output_tokens_per_s=900.0))]
    wide = ratio_of(noisy, lambda one: one.output_tokens_per_s)
    assert wide.low < 0.93 < wide.value < 0.98 < wide.high
    assert math.isinf(ratio_of(rounds[:1], lambda one: one.output_tokens_per_s).high), "one round says nothing"


def test_cpu_time_of_clients_is_not_the_servers() -> None:
    assert server_cpu_per_token(figures(100.0, 1.5)) == pytest.approx(0.02)


def test_both_servers_get_the_same_memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def options(**memory: float) -> tuple[str, ...]:
        settings: Any = SimpleNamespace(config=Config(memory=MemoryConfig(**memory)))
        return bench_observe.with_equal_memory(settings)  # The command itself starts two servers.

    monkeypatch.setattr(bench_observe, "has_gpu", lambda: True)
    assert options() == ("--kv-gib", "16")
    assert options(kv_gib=2.0) == ()
    monkeypatch.setattr(bench_observe, "has_gpu", lambda: False)
    assert options() == ()


@pytest.mark.live
@pytest.mark.alone
def test_the_receiver_takes_spans() -> None:
    with SpanReceiver() as receiver:
        request = urllib.request.Request(f"{receiver.url}/v1/traces", data=b"spans", method="POST")
        assert urllib.request.urlopen(request, timeout=60).status == 200
