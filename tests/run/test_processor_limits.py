"""Measured limits of the processor: the best of a few starts on an idle machine, kept in a file."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from millrace.run.device import processor_limits as module
from millrace.run.device.processor_limits import ProcessorLimits, processor_limits


def test_a_start_on_a_busy_machine_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "MAX_TRIES", 1)
    measured = [ProcessorLimits(float(value), 1.0) for value in (2, 1, 9, 5)]
    monkeypatch.setattr(module, "measure", lambda dtype: measured.pop(0))
    loads = [9999.0, 9999.0, 0.0]
    monkeypatch.setattr(module.os, "getloadavg", lambda: (loads.pop(0), 0.0, 0.0))
    assert [processor_limits(torch.float32).bytes_per_s for _ in range(5)] == [2, 2, 9, 9, 9]


def test_a_machine_that_is_always_busy_is_measured_a_bounded_number_of_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "MAX_BUSY_TRIES", 2)
    measured = [ProcessorLimits(float(value), 1.0) for value in (2, 3)]
    monkeypatch.setattr(module, "measure", lambda dtype: measured.pop(0))
    monkeypatch.setattr(module.os, "getloadavg", lambda: (9999.0, 0.0, 0.0))
    assert [processor_limits(torch.float32).bytes_per_s for _ in range(4)] == [2, 3, 3, 3]


def test_the_best_of_the_first_idle_starts_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "MAX_TRIES", 3)
    measured = [ProcessorLimits(5.0, 1.0), ProcessorLimits(9.0, 3.0), ProcessorLimits(7.0, 4.0)]
    monkeypatch.setattr(module, "measure", lambda dtype: measured.pop(0))
    found = [processor_limits(torch.float32) for _ in range(5)]
    assert [(one.bytes_per_s, one.flops) for one in found] == [(5, 1), (9, 3), (9, 4), (9, 4), (9, 4)]
    (tmp_path / "millrace" / "processor_limits.json").write_text("broken")
    measured.append(ProcessorLimits(2.0, 2.0))
    assert processor_limits(torch.float32).bytes_per_s == 2.0, "a broken file is measured anew"


@pytest.mark.parametrize("is_slow", [False, True])
def test_limits_are_work_over_time(is_slow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_s, num_readings = (8.0 if is_slow else 2.0**-20), 0

    def perf_counter() -> float:
        nonlocal num_readings
        num_readings += 1
        return num_readings * run_s

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "READ_BYTES", 1 << 12)
    monkeypatch.setattr(module, "SIZE", 16)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=perf_counter))
    found = processor_limits(torch.bfloat16)
    assert (found.bytes_per_s, found.flops) == (module.READ_BYTES / run_s, 2 * module.SIZE**3 / run_s)
    # One reading before the runs of each of the three kinds, and one after every run. Slow work runs once.
    assert num_readings == 3 * (1 + (1 if is_slow else module.RUNS))
