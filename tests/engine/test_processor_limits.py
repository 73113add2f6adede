from __future__ import annotations

from pathlib import Path

import pytest
import torch

from millrace.engine.figures import processor_limits as module
from millrace.engine.figures.processor_limits import ProcessorLimits, processor_limits


def test_a_start_on_a_busy_machine_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "MAX_TRIES", 1)
    measured = [ProcessorLimits(float(value), 1.0) for value in (2, 1, 9, 5)]
    monkeypatch.setattr(module, "_measure", lambda dtype: measured.pop(0))
    loads = [9999.0, 9999.0, 0.0]
    monkeypatch.setattr(module.os, "getloadavg", lambda: (loads.pop(0), 0.0, 0.0))
    assert [processor_limits(torch.float32).bytes_per_s for _ in range(5)] == [2, 2, 9, 9, 9]


def test_the_best_of_the_first_idle_starts_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "MAX_TRIES", 3)
    measured = [ProcessorLimits(5.0, 1.0), ProcessorLimits(9.0, 3.0), ProcessorLimits(7.0, 4.0)]
    monkeypatch.setattr(module, "_measure", lambda dtype: measured.pop(0))
    found = [processor_limits(torch.float32) for _ in range(5)]
    assert [(one.bytes_per_s, one.flops) for one in found] == [(5, 1), (9, 3), (9, 4), (9, 4), (9, 4)]
    (tmp_path / "millrace" / "processor_limits.json").write_text("broken")
    measured.append(ProcessorLimits(2.0, 2.0))
    assert processor_limits(torch.float32).bytes_per_s == 2.0, "a broken file is measured anew"


def test_limits_are_plausible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "READ_BYTES", 1 << 22)
    monkeypatch.setattr(module, "SIZE", 128)
    found = module._measure(torch.bfloat16)
    assert 1e7 < found.bytes_per_s < 1e13
    assert 1e7 < found.flops < 1e15


def test_slow_work_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    monkeypatch.setattr(module, "MAX_S", -1.0)
    module._best_s(lambda: runs.append(1))
    assert len(runs) == 1
