"""Repeated decode steps: which rows need a block, and which heads draw."""

from __future__ import annotations

import numpy as np
from helpers.inside import part_of

from millrace.params.rows import RowParams
from millrace.params.sampling import SamplingParams
from millrace.plan.request import Request
from millrace.plan.scheduler import Scheduler, SchedulerSettings
from millrace.plan.shapes.choice import ShapeChoice
from millrace.plan.step import DrawShape, StepPlan
from millrace.run.shapes.padded import PaddedShapes
from millrace.run.shapes.table import ShapeFacts


def decoding(num_rows: int, **settings: object) -> Scheduler:
    """A scheduler whose rows decode, at different places in their blocks."""
    sizes = {"num_blocks": 40 * num_rows, "block_size": 4, "max_running": num_rows, "token_budget": 256}
    scheduler = Scheduler(SchedulerSettings(**{**sizes, **settings}))  # type: ignore[arg-type]
    for index in range(num_rows):
        scheduler.submit(Request(id=index, prompt=np.arange(5 + index, dtype=np.int32), max_tokens=90))
    return scheduler


def missing(scheduler: Scheduler) -> list[int]:
    """Rows whose next token has no block."""
    rows = scheduler.rows
    lacks = rows.computed[rows.order] >= rows.num_blocks[rows.order] * rows.block_size
    return [int(row) for row in rows.order[lacks]]


def advance(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan(0.0)
    assert plan is not None
    scheduler.apply(plan.step_no, np.full(int(plan.samples.sum()), 7, np.int32))
    return plan


def test_repeated_steps_know_which_rows_need_a_block() -> None:
    scheduler, num_known = decoding(6), 0
    for _ in range(30):
        due = missing(scheduler)
        plan, repeated = advance(scheduler), part_of(scheduler, "composer").repeated
        num_known += repeated is not None and repeated.asked_at >= 0
        assert plan.admitted or plan.block_rows.tolist() == due
    assert num_known > 20


def test_a_row_gets_its_block_once_if_a_choice_of_rows_is_made_again() -> None:
    scheduler = decoding(6)
    for _ in range(30):
        due = missing(scheduler)
        before = scheduler.rows.num_blocks.copy()
        scheduler.choose(0.0)
        chosen = scheduler.choose(0.0)
        assert chosen is not None
        if len(chosen.singles) == 6:
            assert np.flatnonzero(scheduler.rows.num_blocks - before).tolist() == sorted(due)
            assert (scheduler.rows.num_blocks - before).max() <= 1
        plan = scheduler.compose(chosen)
        scheduler.apply(plan.step_no, np.full(int(plan.samples.sum()), 7, np.int32))


def test_rows_with_blocks_in_advance_take_none_before_they_need_them() -> None:
    scheduler = decoding(3)
    advance(scheduler)
    part_of(scheduler, "seating").grow(0, 2)
    for _ in range(20):
        due = missing(scheduler)
        assert [row for row in advance(scheduler).block_rows.tolist() if row in due] == due
        rows = scheduler.rows
        assert (rows.num_blocks[rows.order] * rows.block_size >= rows.computed[rows.order]).all()


def test_repeated_steps_draw_as_steps_that_are_planned_anew() -> None:
    """Row 1 draws from logits until its minimum length, so that no end token is drawn."""
    facts = ShapeFacts(max_rows=16, token_budget=256, queries_per_tile=32, block_size=16)
    settings = SchedulerSettings(num_blocks=40, block_size=16, max_running=4, token_budget=256)
    scheduler = Scheduler(settings, ShapeChoice(PaddedShapes(facts)))
    late = RowParams(SamplingParams(temperature=0.0, min_tokens=6), (2,))
    for index, params in enumerate((RowParams(SamplingParams(temperature=0.0)), late)):
        prompt, ends = np.arange(5, dtype=np.int32), params.end_token_ids
        request = Request(id=index, prompt=prompt, max_tokens=20, min_tokens=6 * index, row_params=params)
        request.end_token_ids = ends
        scheduler.submit(request)
    draws = [advance(scheduler).draw for _ in range(12)]
    assert draws == 6 * [DrawShape(full=2)] + 6 * [DrawShape(greedy=2)]
    assert scheduler.abort(1)
    assert scheduler.rows.num_with_minimum == scheduler.rows.num_from_logits == 0
    assert {advance(scheduler).draw for _ in range(3)} == {DrawShape(greedy=1)}
