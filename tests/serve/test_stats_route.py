from __future__ import annotations

from collections.abc import Iterator

import pytest
from serve.front_under_test import MODEL, Front, running_front, saying
from serve.wire import CHAT, get, post

from millrace.observe.history import FrontCounts, History, Sample, engine_series, grid, merge_front_series
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
        assert {"p50", "p95", "p99"} == set(series[name])
    flat = [column for value in series.values() for column in (value.values() if isinstance(value, dict) else [value])]
    assert all(len(column) == 30 for column in flat)
    assert answer["now"]["kv_blocks"]["device"] == {"total": 100, "used": 10, "cached": 30, "free": 60}
    assert answer["totals"]["output_tokens"] > 0


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
