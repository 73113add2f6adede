from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from serve.front_under_test import MODEL, Front, running_front, saying
from serve.wire import CHAT, get, post

from millrace.commands.figures import top
from millrace.observe.histograms import TTFT, Histograms
from millrace.observe.history import (
    FrontCounts,
    History,
    Sample,
    engine_series,
    grid,
    latency_series,
    merge_front_series,
    window_latency,
)
from millrace.observe.sketch import Sketch
from millrace.serve.describe.sampler import take_sample

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with running_front(saying("hello")) as running:
        yield running


def test_stats_have_the_promised_shape(front: Front) -> None:
    post(front.port, CHAT, {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]})
    front.call(lambda: take_sample(front.state, 0.002))
    answer = get(front.port, "/v1/stats?window=60&step=2").json
    series = answer["series"]
    assert len(series["time"]) == 30
    assert series["time"] == sorted(series["time"])
    for name in ("ttft_s", "itl_s", "tpot_s", "queue_s", "e2e_s"):
        assert {"n", "p50", "p95", "p99"} == set(series[name])
    flat = [column for value in series.values() for column in (value.values() if isinstance(value, dict) else [value])]
    assert all(len(column) == 30 for column in flat)
    assert answer["now"]["kv_blocks"]["device"] == {"total": 100, "used": 10, "cached": 30, "free": 60}
    assert answer["totals"]["output_tokens"] > 0


def test_percentiles_of_one_request_are_its_own_times() -> None:
    """The 1.164 s of one request were shown as 1250, 1475 and 1495 ms."""
    history, histograms = History(), Histograms()
    history.add(Sample(100.0, None, FrontCounts()))
    histograms.observe(TTFT, 1, 1.164)
    history.add(Sample(103.0, None, FrontCounts(), Sketch(histograms.take_sketch())))
    histograms.observe(TTFT, 0, 0.2)
    history.add(Sample(106.0, None, FrontCounts(), Sketch(histograms.take_sketch())))
    ends = grid(105.0, 10, 5)
    series = latency_series(history, ends)["ttft_s"]
    assert series == {"n": [0, 1], "p50": [None, 1.164], "p95": [None, 1.164], "p99": [None, 1.164]}
    window = window_latency(history, ends, 107.0)["ttft_s"]
    assert window["points"] == [[103.0, 1.164], [106.0, 0.2]]
    assert (window["n"], window["p50"], window["p95"], window["max"]) == (2, 0.2, 1.164, 1.164)


def test_the_window_of_a_front_has_every_request_and_a_busy_one_no_points(front: Front) -> None:
    for _ in range(3):
        post(front.port, CHAT, {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]})
    front.call(lambda: take_sample(front.state, 0.0))
    found = get(front.port, "/v1/stats?window=300&step=5").json["latency"]["e2e_s"]
    assert found["n"] >= 3
    assert len(found["points"]) == found["n"]
    history = History()
    history.add(Sample(100.0, None, FrontCounts(), sketch_of_many()))
    busy = window_latency(history, [90.0, 101.0], 101.0)["ttft_s"]
    assert busy["n"] == 1000
    assert "points" not in busy


def test_top_shows_how_many_values_its_percentiles_are_of(front: Front) -> None:
    post(front.port, CHAT, {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]})
    front.call(lambda: take_sample(front.state, 0.0))
    stats = get(front.port, "/v1/stats?window=60&step=5").json
    lines = top.table(stats, [])
    found = stats["latency"]["e2e_s"]
    assert found["n"] > 0
    [line] = [line for line in lines if line.startswith("e2e")]
    assert line.split() == ["e2e", f"{found['n']:.0f}", *(f"{1e3 * found[name]:.1f}" for name in ("p50", "p95", "p99"))]


def sketch_of_many() -> Sketch:
    sketch = Sketch()
    sketch.add(np.full(1000, TTFT), np.linspace(0.1, 0.5, 1000))
    return sketch


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("window=0", "window"),
        ("window=901", "window"),
        ("step=x", "step"),
        ("window=10&step=11", "step"),
        ("of=1", "of"),
    ],
)
def test_wrong_queries_are_refused_by_name(front: Front, query: str, param: str) -> None:
    reply = get(front.port, f"/v1/stats?{query}")
    assert reply.status == 400
    assert reply.json["error"]["param"] == param


def test_series_are_differences_and_an_engine_restart_leaves_a_hole(front: Front) -> None:
    engine = front.call(front.engine.stats)
    import msgspec

    def at(time: float, steps: int, tokens: int) -> Sample:
        stats = msgspec.structs.replace(engine, step_no=steps, output_tokens=tokens, plan_seconds=steps * 0.002)
        return Sample(time, stats, FrontCounts())

    history = History()
    for sample in (at(100.0, 10, 50), at(104.9, 20, 150), at(110.2, 5, 5), at(115.0, 15, 35)):
        history.add(sample)
    ends = grid(115.0, 15, 5)
    assert ends == [100.0, 105.0, 110.0, 115.0]
    series = engine_series(history.at(ends), 5)
    assert series["output_tokens_per_s"] == [20.0, 0.0, None]
    assert series["step_ms"]["plan"] == [pytest.approx(2.0), None, None]


def test_fronts_are_summed_and_the_worst_lag_counts() -> None:
    merged = merge_front_series(
        [
            {"errors_per_s": [1.0, None], "event_loop_lag_ms": [5.0, None]},
            {"errors_per_s": [2.0, None], "event_loop_lag_ms": [3.0, 4.0]},
        ]
    )
    assert merged == {"errors_per_s": [3.0, None], "event_loop_lag_ms": [5.0, 4.0]}


def test_cost_of_a_server_without_work_says_so(front: Front) -> None:
    answer = get(front.port, "/v1/cost?price=2.5").json
    assert answer["price_per_hour"] == 2.5
    assert get(front.port, "/v1/cost?price=much").status == 400
