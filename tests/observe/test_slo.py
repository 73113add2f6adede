from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import msgspec
import numpy as np
import pytest

from millrace.cli import main
from millrace.errors import ConfigError
from millrace.link.engine_stats import EngineStats
from millrace.link.messages import Finish
from millrace.observe.histograms import QUEUE, TTFT, Histograms
from millrace.observe.model_figures import is_good
from millrace.observe.slo.dashboard import grafana_dashboard
from millrace.observe.slo.objective import parse_objective, parse_objectives
from millrace.observe.slo.rules import alert_rules
from millrace.observe.slo.tracker import SloTracker

OBJECTIVES = parse_objectives("ttft p95 < 500 ms; interactive: itl p99 < 80 ms")


def stats(histograms: Histograms, step_no: int = 1) -> EngineStats:
    return msgspec.structs.replace(EngineStats(*[0] * 13), step_no=step_no, histograms=histograms.tobytes())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "errors < 0%",
        "errors < 100%",
        "batch: errors < 1%",
        "errors p95 < 1%",
        "errors < 1",
        "ttft < 5 s",
        "ttft p95 < 5",
        "speed p95 < 5 s",
        "vip: ttft p95 < 5 s",
        "ttft p0 < 5 s",
        "ttft p100 < 1 s",
        "adapter pirate: batch: errors < 1%",
        "adapter pirate ttft p95 < 1 s",
        "adapter : ttft p95 < 1 s",
    ],
)
def test_wrong_objectives_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_objective(text, may_name_adapter=True)


def test_only_a_server_follows_objectives_of_adapters() -> None:
    with pytest.raises(ConfigError, match=r"only a server can follow: .*leave 'adapter NAME:' out"):
        parse_objective("adapter pirate: ttft p95 < 1 s")


def test_an_objective_of_an_adapter_counts_its_requests_alone() -> None:
    text = (
        "ttft p90 < 500 ms; adapter Pirate-2.b: ttft p90 < 500 ms; adapter Pirate-2.b: batch: e2e p90 < 9 s;"
        " adapter Pirate-2.b: itl p90 < 80 ms; adapter Pirate-2.b: errors < 10%; errors < 10%"
    )
    objectives = parse_objectives(text)
    assert "; ".join(map(str, objectives)) == text
    names = [one.name for one in objectives]
    assert names[1:3] == ["adapter_Pirate-2.b_all_ttft_p90", "adapter_Pirate-2.b_batch_e2e_p90"]
    tracker, everything, own = SloTracker(objectives), Histograms(), Histograms()

    def report(step_no: int) -> EngineStats:
        given = {"Pirate-2.b": own.tobytes()}
        return msgspec.structs.replace(stats(everything, step_no), adapter_histograms=given)

    tracker.sample(9_990.0, report(0))
    for seconds in [0.1] * 8 + [3.0] * 2:
        everything.observe(TTFT, 1, seconds)
    for seconds in [0.1] + [3.0] * 2:
        own.observe(TTFT, 1, seconds)
    own.observe_gaps(np.array([0.01, 0.5]), np.array([1, 1]), np.array([7, 3]))
    tracker.sample(10_000.0, report(1), 50, 9, {"Pirate-2.b": (20, 4)})
    counts = [(one["adapter"], one["good"], one["total"]) for one in tracker.report(10_001.0)]
    assert counts[:3] == [("", 8, 10), ("Pirate-2.b", 1, 3), ("Pirate-2.b", 0, 0)]
    assert counts[3:] == [("Pirate-2.b", 7, 10), ("Pirate-2.b", 16, 20), ("", 41, 50)]


def test_objectives_read_back_as_they_are_written() -> None:
    assert [str(one) for one in OBJECTIVES] == ["ttft p95 < 500 ms", "interactive: itl p99 < 80 ms"]
    assert parse_objective("Interactive: ITL p99.9 <= 1.5s").limit_s == 1.5


def test_burn_rates_follow_the_windows_and_survive_a_restart() -> None:
    tracker, histograms = SloTracker(parse_objectives("ttft p90 < 500 ms")), Histograms()
    tracker.sample(9_990.0, stats(histograms))
    for _ in range(90):
        histograms.observe(TTFT, 1, 0.1)
    tracker.sample(10_000.0, stats(histograms))
    for _ in range(10):
        histograms.observe(TTFT, 1, 3.0)
        histograms.observe(QUEUE, 1, 2.5)
    tracker.sample(13_000.0, stats(histograms))
    assert tracker.burn_rate(0, 3600, 13_010.0) == pytest.approx(1.0)
    assert tracker.burn_rate(0, 300, 13_010.0) == pytest.approx(10.0)
    assert not tracker.is_burning(0, 13_010.0)
    [report] = tracker.report(13_010.0)
    assert (report["good"], report["total"], report["is_met"]) == (90, 100, True)
    assert report["budget_left"] == pytest.approx(0.0, abs=1e-9)
    assert report["used_by"] == [{"time": 12_960.0, "beyond_limit": 10, "of": 10, "cause": "waiting in the queue"}]
    fresh = Histograms()
    for _ in range(20):
        fresh.observe(TTFT, 1, 3.0)
    tracker.sample(13_020.0, stats(fresh, step_no=0))
    assert tracker.total == [120.0]
    assert tracker.burning(16_000.0) == []
    assert tracker.burning(13_060.0) == [] or tracker.burn_rate(0, 3600, 13_060.0) > 2


def test_error_objectives_count_failed_requests_over_thirty_days() -> None:
    [objective] = parse_objectives("errors < 0.1%")
    assert (str(objective), objective.name) == ("errors < 0.1%", "all_errors_0_1")
    assert parse_objective(str(objective)) == objective
    tracker, day_s = SloTracker((objective,)), 86_400.0
    for day in range(40):
        tracker.sample(day * day_s, None, asked=1000 * (day + 1), failed=2 * (day + 1))
    [report] = tracker.report(39 * day_s + 10)
    assert 30_000 <= report["total"] <= 31_000
    assert report["total"] - report["good"] == report["total"] // 500
    assert not report["is_met"]
    assert report["burn"]["30d"] == pytest.approx(2.0)
    assert report["burn"]["5m"] == pytest.approx(2.0)
    other = SloTracker((objective,))
    other.sample(39 * day_s, None, asked=1_000_000, failed=0)
    [merged] = tracker.report(39 * day_s + 10, [other.error_counts(39 * day_s + 10)])
    assert merged["total"] == report["total"] + 1_000_000
    assert merged["is_met"]


def test_counts_of_objectives_go_on_after_a_restart() -> None:
    objectives = parse_objectives("errors < 1%; ttft p90 < 500 ms")
    before, histograms = SloTracker(objectives), Histograms()
    before.sample(1000.0, stats(histograms))
    for number in range(1, 200):
        histograms.observe(TTFT, 1, 0.1 if number % 2 else 3.0)
        before.sample(1000.0 + 60 * number, stats(histograms, number + 1), asked=10 * number, failed=number)
    now = 1000.0 + 60 * 200
    stored = json.loads(json.dumps(before.stored()))
    after = SloTracker((objectives[1], objectives[0], *parse_objectives("queue p50 < 1 s")))
    after.restore(stored)
    errors, ttft = before.report(now)
    kept_ttft, kept_errors, new = after.report(now)
    assert (kept_errors["good"], kept_errors["total"]) == (errors["good"], errors["total"]) == (1791, 1990)
    assert kept_ttft["burn"] == pytest.approx(ttft["burn"])
    assert new["total"] == 0
    after.sample(now, stats(histograms, 200))
    assert after.report(now)[0]["total"] == ttft["total"], "what the engine did before is in the stored counts already"
    after.sample(now + 1, None, asked=5, failed=5)
    assert after.report(now + 1)[1]["good"] == 1791
    assert after.report(now + 1)[1]["total"] == 1995


def test_records_before_the_last_three_days_are_hourly() -> None:
    tracker = SloTracker(parse_objectives("errors < 1%"))
    for hour in range(24 * 40):
        for minute in (0, 20, 40):
            asked = 3 * hour + minute // 20 + 1
            tracker.sample(3600.0 * hour + 60 * minute, None, asked=asked, failed=0)
    starts = tracker.stored()["errors < 1%"]["starts"]
    assert len(starts) <= 30 * 24 + 2 * 3 * 24 + 8
    [report] = tracker.report(3600.0 * 24 * 40)
    assert abs(report["total"] - 3 * 24 * 30) <= 4


def test_alert_rules_of_error_objectives_use_the_counters_of_all_fronts() -> None:
    failed, asked = "sum(rate(millrace_failed_requests_total[1h]))", "sum(rate(millrace_asked_requests_total[1h]))"
    assert f"{failed} / {asked} / 0.001" in alert_rules(parse_objectives("errors < 0.1%"))


def test_a_front_that_starts_late_does_not_see_the_past_as_this_minute() -> None:
    tracker, histograms = SloTracker(parse_objectives("ttft p90 < 500 ms")), Histograms()
    for _ in range(50):
        histograms.observe(TTFT, 1, 3.0)
    tracker.sample(10_000.0, stats(histograms))
    assert tracker.total == [50.0], "the counter is the same at every front"
    assert tracker.burning(10_001.0) == []


def test_a_budget_burns_only_after_several_values() -> None:
    tracker, histograms = SloTracker(parse_objectives("ttft p90 < 500 ms")), Histograms()
    tracker.sample(10_000.0, stats(histograms))
    for number in range(1, 11):
        histograms.observe(TTFT, 1, 3.0)
        tracker.sample(10_000.0 + number, stats(histograms))
        assert bool(tracker.burning(10_011.0)) == (number == 10)


def test_goodput_counts_objectives_of_the_class_only() -> None:
    slow = Finish(1, "stop", output_tokens=11, first_token_s=0.2, total_s=1.2)
    assert is_good(slow, 1, 0.0, OBJECTIVES)
    assert not is_good(slow, 0, 0.0, OBJECTIVES)
    assert not is_good(slow, 1, 0.4, OBJECTIVES)
    assert not is_good(msgspec.structs.replace(slow, reason="error"), 1, 0.0, OBJECTIVES)


def test_the_dashboard_has_a_panel_per_objective() -> None:
    dashboard = grafana_dashboard(OBJECTIVES)
    titles = [panel["title"] for panel in dashboard["panels"]]
    assert "Burn rate: interactive: itl p99 < 80 ms" in titles
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)


@pytest.mark.live
@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian's prometheus) is not installed")
def test_alert_rules_are_valid_for_prometheus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["slo", "rules", "--slos", "; ".join(map(str, OBJECTIVES))]) == 0
    written = capsys.readouterr().out
    assert written == alert_rules(OBJECTIVES)
    rules = tmp_path / "rules.yml"
    rules.write_text(written)
    checked = subprocess.run(["promtool", "check", "rules", str(rules)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    num_rules = written.count("- alert:") + written.count("- record:")
    assert f"{num_rules} rules found" in checked.stdout


def test_the_command_writes_a_dashboard(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["slo", "dashboard", "--slos", "ttft p95 < 500 ms"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "Millrace"
