"""What counting costs: host time of a decode step with and without the engine's figures, in alternating steps."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from millrace.bench.figures import Figure
from millrace.engine.cycle import Confirmed
from millrace.engine.figures.step_figures import ModelWork, StepFigures
from millrace.observe.histograms import Histograms
from millrace.plan.request import Request
from millrace.plan.scheduler import Scheduler, SchedulerSettings
from millrace.run.protocol import StepResult

SIZES = (1, 64, 256, 2048)
NUM_STEPS = 400
BLOCK_SIZE = 16
COUNT_EVERY = 50
"""Noted steps between two counts, about as many as a GPU runs between two reports."""


def counting_figures() -> Iterator[Figure]:
    for num_rows in SIZES:
        without, counted, later = measure(num_rows)
        extra = float(np.median(counted) - np.median(without)) + later
        spread = 1.96 * float(np.sqrt(_error(without) ** 2 + _error(counted) ** 2))
        note = f"± {spread:.1f} µs; plan and apply alone {np.median(without):.0f} µs"
        yield Figure("counting", f"{num_rows:,} rows, more per step", extra, "µs", requests=NUM_STEPS, note=note)


def _error(values: list[float]) -> float:
    """Standard error of a median."""
    low, high = np.percentile(values, [25, 75]).tolist()
    return float(1.253 * (high - low) / 1.349 / len(values) ** 0.5)


def measure(num_rows: int, num_steps: int = NUM_STEPS) -> tuple[list[float], list[float], float]:
    """Microseconds of steps without and with figures, and what counting all noted steps at once takes for each."""
    scheduler = Scheduler(
        SchedulerSettings(
            num_blocks=num_rows * (num_steps // BLOCK_SIZE + 5),
            block_size=BLOCK_SIZE,
            max_running=num_rows,
            token_budget=num_rows * 2 * BLOCK_SIZE,
        )
    )
    for index in range(num_rows):
        prompt = np.full(BLOCK_SIZE + index % BLOCK_SIZE, index, np.int32)
        scheduler.submit(Request(id=index, prompt=prompt, max_tokens=num_steps + 40, end_token_ids=(2, 3)))
    figures = StepFigures(scheduler.rows, Histograms(), ModelWork(1.0, 1.0, 1.0, 1.0))
    no_result = _no_result()
    figures_off: list[float] = []
    figures_on: list[float] = []
    counting_us, num_counted = 0.0, 0
    for step in range(num_steps + 20):
        began = time.perf_counter()
        plan = scheduler.plan(float(step))
        if plan is None:
            raise AssertionError("a steady decode never runs dry")
        tokens = np.full(len(plan.rows), 7, np.int32)
        outcome = scheduler.apply(plan.step_no, tokens)
        if step % 2:
            figures.on_step(Confirmed(plan, no_result, outcome, began, began, 0.01))
        noted = time.perf_counter()
        if step >= 20:
            (figures_on if step % 2 else figures_off).append(1e6 * (noted - began))
        if step % (2 * COUNT_EVERY) == 0:
            figures.count()
            counting_us += 1e6 * (time.perf_counter() - noted)
            num_counted += COUNT_EVERY
    return figures_off, figures_on, counting_us / num_counted


def _no_result() -> StepResult:
    import torch

    none = np.zeros(0, np.int64)
    return StepResult(0, torch.zeros(0), None, none, none.astype(np.int32), ())
