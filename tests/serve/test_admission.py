"""Admission control: requests that would not be served in time are refused at once."""

from __future__ import annotations

import time

import msgspec
import pytest
from serve.front_under_test import MODEL, running_front, saying
from serve.wire import COMPLETIONS, get, post

from millrace.config import Config, replace
from millrace.engine.figures.rates import MeasuredRates
from millrace.errors import Overloaded
from millrace.link.engine_stats import EngineStats
from millrace.observe.histograms import TTFT, Histograms
from millrace.observe.slo.tracker import SloTracker
from millrace.serve.tenancy.admission import AdmissionControl, forecast

CONFIG = replace(
    Config(),
    plan__max_waiting=100,
    server__ttft_interactive_s=2.0,
    server__ttft_standard_s=20.0,
    server__ttft_batch_s=0.0,
)


def stats(
    waiting: tuple[int, int, int] = (0, 0, 0),
    *,
    admission_rate: float = 5.0,
    free: int = 0,
    tokens: int = 0,
    speed: float = 0.0,
    step_s: float = 0.0,
    batch_rows: int = 0,
) -> EngineStats:
    return EngineStats(
        step_no=1,
        running=10,
        waiting=sum(waiting),
        blocks_total=1,
        blocks_free=1,
        blocks_cached=0,
        prefix_hit_tokens=0,
        prefix_query_tokens=0,
        preemptions=0,
        prompt_tokens=0,
        output_tokens=0,
        step_seconds=0.0,
        plan_seconds=0.0,
        waiting_by_class=waiting,
        waiting_tokens=(tokens, 0, 0),
        rows_free=free,
        admissions_per_s=admission_rate,
        tokens_per_s=speed,
        mean_step_s=step_s,
        running_by_class=(0, 0, batch_rows),
    )


def test_only_the_same_and_more_urgent_classes_are_ahead() -> None:
    # It is the 4th, 16th and 64th to be admitted: as many divided by 5 per second, and one standard deviation more.
    report = stats((3, 12, 48))
    assert [forecast(report, 0, priority).ttft_s for priority in range(3)] == [6 / 5, 20 / 5, 72 / 5]
    assert forecast(report, 5, 0).ttft_s == 12 / 5
    assert forecast(stats((5, 20, 60), free=26), 0, 1).ttft_s == 0.0
    assert forecast(stats((5, 20, 60), free=25), 0, 1).ttft_s == 2 / 5
    assert forecast(stats((1, 0, 0), free=5, tokens=9000, speed=3000.0), 0, 0).ttft_s == 3.0
    assert forecast(stats((50, 0, 0), admission_rate=0.0), 0, 0).ttft_s == 0.0, "no rate is known yet: admit"


def test_steps_add_to_a_wait_and_batch_rows_give_way_to_interactive_requests() -> None:
    slow = stats((0, 0, 30), step_s=0.4)
    assert forecast(slow, 0, 0).ttft_s == pytest.approx(2 / 5 + 2 * 0.4)
    assert forecast(stats((0, 0, 30), step_s=0.4, batch_rows=1), 0, 0).ttft_s == 0.0
    assert forecast(stats((0, 0, 0), step_s=0.4, batch_rows=1), 0, 1).ttft_s == pytest.approx(2 / 5 + 2 * 0.4)
    assert forecast(stats((0, 0, 0), step_s=9.0, free=1), 0, 0).ttft_s == 0.0, "nothing to wait for: never refused"


def test_a_refused_request_gets_a_time_to_retry() -> None:
    admission = AdmissionControl(CONFIG)
    admission.check(None, 1000, 0, 1)
    admission.check(stats((5, 0, 0)), 0, 0, 1)
    with pytest.raises(Overloaded, match="'interactive' would wait about 8.4 s") as refused:
        admission.check(stats((35, 0, 0)), 0, 0, 1)
    assert refused.value.retry_after_s == pytest.approx(6.4)
    admission.check(stats((40, 0, 0)), 0, 1, 1)


def test_the_queue_is_bounded_and_batch_is_shed_first() -> None:
    admission = AdmissionControl(CONFIG)
    report = stats((0, 0, 60))
    admission.check(report, 0, 0, 1)
    admission.check(report, 0, 1, 1)
    with pytest.raises(Overloaded, match="class 'batch' may fill it up to 50") as refused:
        admission.check(report, 0, 2, 1)
    assert refused.value.retry_after_s == pytest.approx(11 / 5)
    fuller = stats((0, 0, 95))
    admission.check(fuller, 0, 0, 1)
    with pytest.raises(Overloaded):
        admission.check(fuller, 0, 1, 1)
    with pytest.raises(Overloaded):
        admission.check(stats((0, 0, 100)), 0, 0, 1)
    AdmissionControl(Config()).check(stats(), 0, 2, 20_000)  # One large request on an idle server is not a queue.


def test_the_measured_rate_is_capacity_not_demand() -> None:
    rates = MeasuredRates()
    for second in range(10):
        rates.on_admitted(1)
        rates.on_ended(2.0)
        rates.sample(float(second))
    assert rates.admissions_per_s(100) == 50.0
    assert rates.admissions_per_s(0) == 1.0
    rates.on_step(10, 1.0)
    assert rates.tokens_per_s == 0.0
    rates.on_step(1000, 0.5)
    assert rates.tokens_per_s == 2000.0


def test_one_slow_first_step_does_not_refuse_for_long() -> None:
    rates = MeasuredRates()
    rates.on_step(512, 20.0)  # Cold caches, or a graph being captured.
    for _ in range(10):
        rates.on_step(512, 0.1)
    report = stats(free=5, tokens=512, speed=rates.tokens_per_s, step_s=rates.step_s)
    AdmissionControl(Config()).check(report, 0, 0, 1)
    for _ in range(30):
        rates.on_step(512, 0.1)
    assert rates.step_s < 0.5
    assert rates.tokens_per_s == pytest.approx(5120, rel=0.1)
    rates.on_step(512, 20.0)
    assert rates.step_s < 1.5, "a late one counts little"


@pytest.mark.live
def test_a_refusal_over_http_is_a_counted_429_with_retry_after() -> None:
    with running_front(saying("ok"), config=replace(CONFIG, server__port=0)) as front:
        front.call(lambda: setattr(front.state.client, "stats", stats((35, 0, 0))))
        fields = {"model": MODEL, "prompt": "hi", "max_tokens": 2}
        refused = post(front.port, COMPLETIONS, {**fields, "priority": "interactive"})
        assert (refused.status, refused.error["code"]) == (429, "overloaded")
        assert refused.error["type"] == "rate_limit_error"
        assert refused.headers["retry-after"] == "7"
        assert post(front.port, COMPLETIONS, fields).status == 200
        assert (
            'millrace_refused_requests_total{priority="interactive"} 1.0' in get(front.port, "/metrics").body.decode()
        )


@pytest.mark.live
def test_ready_and_the_admission_of_batches_follow_the_error_budget() -> None:
    config = replace(
        CONFIG,
        server__port=0,
        observe__slos="interactive: ttft p90 < 500 ms; batch: ttft p90 < 500 ms",
        observe__slo_ready=True,
        observe__slo_admission=True,
    )
    with running_front(saying("ok"), config=config) as front:
        fields = {"model": MODEL, "prompt": "hi", "max_tokens": 2}

        def burn(priority: int) -> None:
            tracker, histograms = SloTracker(front.state.figures.slos.objectives), Histograms()
            for _ in range(2):
                report = msgspec.structs.replace(stats(), histograms=histograms.tobytes())
                tracker.sample(time.time(), report)
                for _ in range(20):
                    histograms.observe(TTFT, priority, 3.0)
            front.state.figures.slos = tracker

        assert get(front.port, "/ready").status == 200
        front.call(lambda: burn(2))
        assert post(front.port, COMPLETIONS, {**fields, "priority": "batch"}).status == 200, "only its own budget burns"
        front.call(lambda: burn(0))
        ready = get(front.port, "/ready")
        assert (ready.status, "interactive: ttft p90 < 500 ms" in ready.body.decode()) == (503, True)
        refused = post(front.port, COMPLETIONS, {**fields, "priority": "batch"})
        assert (refused.status, "error budget" in refused.error["message"]) == (429, True)
        assert "retry-after" in refused.headers
        assert post(front.port, COMPLETIONS, fields).status == 200
