from __future__ import annotations

import math

import numpy as np
import pytest

from millrace.engine.figures.step_figures import StepFigures, StepWork
from millrace.observe.histograms import ITL, Histograms
from millrace.plan.request import Request
from millrace.plan.scheduler import Scheduler


class Driven:
    """A scheduler whose steps are counted; each step has its own time."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(num_blocks=64, block_size=4, max_running=8, token_budget=32)
        self.histograms = Histograms()
        self.figures = StepFigures(self.scheduler.rows, self.histograms, StepWork(1000.0, 10.0, 2.0, 1.0))

    def submit(self, number: int, *, prompt: int = 4, max_tokens: int = 50, priority: int = 1) -> None:
        tokens = np.arange(prompt, dtype=np.int32) + 100 * number
        self.scheduler.submit(Request(id=number, prompt=tokens, max_tokens=max_tokens, priority=priority))

    def step(self, now: float) -> int:
        plan = self.scheduler.plan(now)
        assert plan is not None
        for admission in plan.admitted:
            self.figures.on_admitted(admission.row, math.nan)
        outcome = self.scheduler.apply(plan.step_no, np.full(int(plan.samples.sum()), 5, np.int32))
        self.figures.on_step(plan, outcome, now)
        return len(outcome.tokens)

    def gaps(self) -> tuple[list[float], list[float]]:
        """Number and sum of the gaps by class."""
        itl = self.histograms.values[ITL]
        return itl[:, :-1].sum(axis=1).tolist(), itl[:, -1].tolist()


def test_every_gap_between_tokens_counts_once() -> None:
    driven = Driven()
    driven.submit(1, max_tokens=6, priority=0)
    driven.submit(2)
    for now in (1.0, 1.25, 1.5):
        assert driven.step(now) == 2
    counts, sums = driven.gaps()
    assert (counts, sums) == ([2, 2, 0], [pytest.approx(0.5), pytest.approx(0.5), 0])
    driven.submit(3, priority=2)
    assert driven.step(2.0) == 3
    assert driven.step(2.25) == 3
    assert driven.step(2.5) == 3  # The last token of request 1.
    assert driven.step(4.0) == 2
    counts, sums = driven.gaps()
    assert counts == [5, 6, 3]
    assert sums == [pytest.approx(1.5), pytest.approx(3.0), pytest.approx(2.0)]
    assert driven.figures.output_tokens == 6 + 7 + 4


def test_a_reused_row_begins_without_a_gap() -> None:
    driven = Driven()
    driven.submit(1, max_tokens=2)
    driven.step(1.0)
    driven.step(1.5)
    driven.submit(2, max_tokens=2)
    driven.step(9.0)
    driven.step(9.25)
    assert driven.gaps()[1] == [0, pytest.approx(0.75), 0]


def test_composition_and_work_of_steps() -> None:
    driven = Driven()
    driven.submit(1, prompt=6)
    driven.submit(2, prompt=3)
    driven.step(1.0)
    figures = driven.figures
    assert (figures.prefill_tokens, figures.decode_tokens, figures.step_rows) == (9, 0, 2)
    pairs = 6 * 7 // 2 + 3 * 4 // 2
    assert figures.flops == 9 * 10 + pairs
    assert figures.bytes_read == 1000 + 2 * 9
    for now in (2.0, 3.0):
        driven.step(now)
    assert figures.decode_tokens == 4
    assert figures.bytes_read == 3000 + 2 * (9 + 11 + 13)
    assert figures.flops == 9 * 10 + pairs + 4 * 10 + 11 + 13
