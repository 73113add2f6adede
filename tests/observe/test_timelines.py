from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.engine.figures.step_log import CAPACITY, StepHistory
from millrace.load.roofline import MachineLimits, page, report
from millrace.observe.perfetto import bars, request_slices, step_slices, trace_file

EXPLANATION = {
    "id": "a",
    "sequences": [{"stages_s": {"front": 0.01, "link": 0.001, "queue": 0.2, "prefill": 0.1, "total": 0.311}}],
}


def test_stages_of_a_request_follow_each_other() -> None:
    slices = request_slices(EXPLANATION)
    assert [one.name for one in slices] == ["front", "link", "queue", "prefill"]
    assert slices[-1].start_s + slices[-1].seconds == pytest.approx(0.311)
    drawn = bars(slices)
    assert "200.00 ms" in drawn[2]
    assert drawn[2].count("█") > drawn[3].count("█") > drawn[0].count("█") > 0


def steps_of(log: StepHistory, count: int, total: int) -> dict[str, Any]:
    steps = [(number, number, number + 0.5, 0.4, 4, 64 * (number % 5 == 0), 4, 1e6, 1e7) for number in range(total)]
    for first in range(0, total, 100):
        log.add(np.array(steps[first : first + 100], np.float64))
    return log.last(count)


def test_the_log_keeps_the_last_steps(tmp_path: Path) -> None:
    found = steps_of(StepHistory(), 10, CAPACITY + 7)
    assert found["step_no"] == list(range(CAPACITY - 3, CAPACITY + 7))
    assert set(found["decode_tokens"]) == {4}
    assert set(found["bytes"]) == {1_000_000}
    slices = step_slices(found)
    assert slices[0].start_s == 0.0
    assert slices[1].start_s == pytest.approx(1.0)
    events = trace_file(slices, "millrace")["traceEvents"]
    assert json.dumps(events)
    assert [event["ph"] for event in events].count("X") == 10
    assert StepHistory().last(5)["step_no"] == []


def test_a_profile_names_both_kinds_of_steps_and_draws_the_roof() -> None:
    found = {**steps_of(StepHistory(), 50, 50), "model": "m", "device": "d"}
    limits = MachineLimits(1e9, 1e11, False)
    lines = report(found, {"series": {"step_ms": {"plan": [0.1, None]}}}, limits)
    assert any(line.startswith("decode only") and "40 steps" in line for line in lines)
    assert any(line.startswith("with prefill") and "10 steps" in line for line in lines)
    assert page(found, limits).count("<circle") == 100
    assert any(line == "device busy 40% of 49.5 s" for line in lines)


def test_a_profile_leaves_out_the_time_in_which_the_server_had_no_work() -> None:
    """The step log gets an old step only when the next ones come: 300 s in which nothing ran are not idle capacity."""
    found = {**steps_of(StepHistory(), 11, 11), "model": "m", "device": "d"}
    found["launched"][0] -= 300
    found["done"][0] -= 300
    lines = report(found, {"series": {"step_ms": {}}}, MachineLimits(1e9, 1e11, False))
    assert any(line == "device busy 44% of 10.0 s, pauses of 300 s without work left out" for line in lines), lines
