"""The bars of `bench smooth` and its rounds."""

from __future__ import annotations

import argparse

import pytest

from millrace.bench.http import smooth
from millrace.bench.http.smooth import Run
from millrace.commands.benchmarks import bench_smooth
from millrace.terminal.parser import UsageError


def run_of(name: str, *, gap_s: float, small_s: float, rate: float) -> Run:
    return Run(name, None, [0.1, gap_s], [3.0], [rate], [1.0, small_s], [rate])  # type: ignore[arg-type]


def notes(run: Run) -> dict[str, str]:
    return {figure.metric: figure.note for figure in run.figures() if figure.note}


def test_bars_are_met_or_missed() -> None:
    good = notes(run_of("smooth", gap_s=0.2, small_s=5.0, rate=100.0))
    assert len(good) == 4
    assert all(note.endswith(": met") for note in good.values())
    bad = notes(run_of("smooth", gap_s=0.6, small_s=12.0, rate=100.0))
    assert bad["gap most"] == "bar 500 ms: MISSED"
    assert bad["small tenant's 16 tokens, most"] == "bar 10 s: MISSED"
    assert bad["small tenant's 16 tokens, p50"] == "bar 6 s: MISSED"


def test_the_server_without_a_target_has_no_bars() -> None:
    assert notes(run_of("off", gap_s=9.0, small_s=30.0, rate=100.0)) == {}


@pytest.mark.parametrize(("rate", "verdict"), [(91.0, "met"), (89.0, "MISSED")])
def test_throughput_is_held_to_that_without_a_target(rate: float, verdict: str) -> None:
    off = run_of("off", gap_s=1.0, small_s=1.0, rate=100.0)
    # The public entry measures a server.
    compared = list(smooth.compared(run_of("smooth", gap_s=0.1, small_s=1.0, rate=rate), off))
    assert [figure.note for figure in compared] == [f"bar 0.9: {verdict}"] * 2


def test_every_bar_has_a_line() -> None:
    lines = smooth.verdicts(list(run_of("smooth", gap_s=0.6, small_s=5.0, rate=100.0).figures()))
    assert len(lines) == 4
    assert "smooth: beside 4,000 tokens, gap most: 600 ms, bar 500 ms: MISSED" in lines


def test_rounds_out_of_range_are_refused() -> None:
    with pytest.raises(UsageError, match="--rounds is 0"):
        bench_smooth.run(argparse.Namespace(rounds=0))
