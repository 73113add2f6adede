"""The best of several tries counts, and they end within a bounded time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from millrace.sources import estimate, memory_rate
from millrace.sources.memory_rate import LIMIT_S, NUM_TRIES, PAUSE_S, memory_bytes_per_s, shortest_s


class Machine:
    """Runs take the given times, one after the other, then the last of them."""

    def __init__(self, *times_s: float) -> None:
        self.now, self.times_s, self.num_runs, self.slept_s = 0.0, times_s, 0, 0.0

    def work(self) -> None:
        self.now += self.times_s[min(self.num_runs, len(self.times_s) - 1)]
        self.num_runs += 1

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept_s += seconds

    def shortest_s(self) -> float:
        return shortest_s(self.work, clock=lambda: self.now, sleep=self.sleep)


def test_one_undisturbed_try_among_slow_ones_counts() -> None:
    machine = Machine(0.03, 0.04, 0.03, 0.005, 0.03)
    assert machine.shortest_s() == pytest.approx(0.005)
    assert machine.now < LIMIT_S + 0.04


def test_tries_are_apart_and_end_on_a_quick_machine() -> None:
    machine = Machine(0.001)
    assert machine.shortest_s() == pytest.approx(0.001)
    assert machine.num_runs == NUM_TRIES
    assert machine.slept_s == pytest.approx(NUM_TRIES * PAUSE_S)


def test_a_try_longer_than_the_limit_is_the_only_one() -> None:
    machine = Machine(2 * LIMIT_S, 0.001)
    assert machine.shortest_s() == pytest.approx(2 * LIMIT_S)
    assert machine.num_runs == 1


def test_every_byte_is_read_once_per_try(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def once(work: object) -> float:
        assert callable(work)
        work()
        return 0.5

    monkeypatch.setattr(memory_rate, "PROBE_BYTES", 8000)
    monkeypatch.setattr(memory_rate, "shortest_s", once)
    monkeypatch.setattr(memory_rate, "usable_cores", lambda: 3)
    split = np.array_split

    def splitting(array: np.ndarray, count: int) -> list[np.ndarray]:
        parts = split(array, count)
        read.extend(part.nbytes for part in parts)
        return parts

    monkeypatch.setattr(np, "array_split", splitting)
    assert memory_bytes_per_s() == 16_000.0
    assert (len(read), sum(read)) == (3, 8000)


def test_the_estimate_divides_the_rate_by_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "memory_bytes_per_s", lambda: 9.3e9)
    monkeypatch.setattr(estimate, "has_gpu", lambda: False)
    monkeypatch.setattr(estimate, "is_busy", lambda: False)
    lines = list(estimate.estimate_lines("somebody/unknown-model", 300_000_000))
    assert "at most about 31 tokens/s" in lines[-1]
    assert "memory gives 9.3 GB/s." in lines[-1]
    assert "at most about 9.3 tokens/s" in list(estimate.estimate_lines("somebody/unknown-model", 1_000_000_000))[-1]
    assert "at most about 3,100 tokens/s" in list(estimate.estimate_lines("somebody/unknown-model", 3_000_000))[-1]


@pytest.mark.parametrize(("load", "is_said"), [(2.0, False), (2.1, True)])
def test_a_rate_that_was_measured_on_a_busy_machine_says_so(
    monkeypatch: pytest.MonkeyPatch, load: float, is_said: bool
) -> None:
    monkeypatch.setattr(estimate, "memory_bytes_per_s", lambda: 2.4e9)
    monkeypatch.setattr(estimate, "has_gpu", lambda: False)
    monkeypatch.setattr(estimate, "usable_cores", lambda: 2)
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    last = list(estimate.estimate_lines("somebody/unknown-model", 300_000_000))[-1]
    assert ("memory gives 2.4 GB/s now. Other programs keep this machine busy" in last) == is_said


def test_no_speed_of_writing_is_promised_for_a_model_that_only_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate, "memory_bytes_per_s", lambda: 9.3e9)
    monkeypatch.setattr(estimate, "has_gpu", lambda: False)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    for name in ("reranker", "all-minilm-l6-v2", str(tmp_path)):
        lines = list(estimate.estimate_lines(name, 11_000_000))
        assert "tokens/s" not in " ".join(lines)
        assert f"millrace bench encode --model {name}" in lines[-1]
