"""`bench front`, `bench policies` and the channel benchmark run and give plausible figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.bench.errors import BenchError
from millrace.bench.micro.front import FrontBench
from millrace.bench.micro.link import measure_link
from millrace.bench.micro.policies import POLICIES, compare, plot_svg, policy_figures, read_trace
from millrace.cli import main
from millrace.config import DEFAULT_MODEL


@pytest.mark.live
@pytest.mark.alone
def test_front_is_measured_over_the_null_engine() -> None:
    cost = FrontBench(DEFAULT_MODEL, fronts=1, streams=8, tokens=16, seconds=1.0).run()
    assert cost.errors == 0
    assert cost.tokens_per_s > 0
    assert cost.us_per_token > 0
    assert 0 < cost.frames_per_token < 1.6, "a frame per token and a few at the ends, or several tokens in one"
    assert 0 < cost.ttft_p50_ms <= cost.ttft_p99_ms


@pytest.mark.live
@pytest.mark.alone
def test_messages_are_measured_between_processes() -> None:
    cost = measure_link(fronts=2, rows=64, rounds=20)
    assert min(cost.send_us, cost.answer_us, cost.empty_us) > 0


def test_policies_are_compared_on_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = [
        f"2023-11-16 18:15:{46 + i // 20}.{i % 20:02d}00000,{50 + i * 7 % 300},{5 + i * 13 % 90}" for i in range(200)
    ]
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows))
    arrivals = read_trace(trace, 150, speed=2.0)
    assert len(arrivals) == 150
    results = list(compare(arrivals))
    verdicts = [policy_figures(done) for done in results]
    assert [verdict.policy for verdict in verdicts] == list(POLICIES)
    for verdict in verdicts:
        assert 0 < verdict.ttft_p50_s <= verdict.ttft_p99_s
        assert 0 < verdict.fairness <= 1
        assert verdict.goodput > 0
    assert plot_svg(results).count("<polyline") == len(POLICIES)


def test_file_that_is_not_a_trace_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "no.csv"
    file.write_text("a,b\n1,2\n")
    with pytest.raises(BenchError, match="TIMESTAMP"):
        read_trace(file, 10, 1.0)
    assert main(["bench", "policies"]) == 2
    assert "--trace" in capsys.readouterr().err
