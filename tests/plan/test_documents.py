"""Documents that rows take from the cache at other positions: what steps compute and copy, and what failures undo."""

from __future__ import annotations

import numpy as np

from millrace.params.keeping import Documents, DocumentSpan
from millrace.plan.request import Request
from millrace.plan.scheduler import Scheduler, SchedulerSettings
from millrace.plan.step import StepPlan

SIZE = 4
TEXT = np.arange(100, 112, dtype=np.int32)
"""Three blocks."""


def ready_scheduler(num_blocks: int = 32) -> Scheduler:
    """The text was computed alone."""
    settings = SchedulerSettings(num_blocks=num_blocks, block_size=SIZE, max_running=4, token_budget=64)
    scheduler = Scheduler(settings)
    scheduler.submit(Request(1, TEXT, max_tokens=0))
    run(scheduler)
    return scheduler


def asked(number: int = 2, *, read_cache: bool = True) -> Request:
    """Five tokens, the text, three tokens, the text again and a question. Of each text two tokens are computed."""
    start = 5
    again = start + len(TEXT) + 3
    parts = [np.arange(start), TEXT, np.arange(50, 53), TEXT, np.arange(60, 66)]
    spans = (DocumentSpan(start, start + 12, start + 2), DocumentSpan(again, again + 12, again + 2))
    prompt = np.concatenate(parts).astype(np.int32)
    return Request(number, prompt, max_tokens=3, documents=Documents(spans), read_cache=read_cache)


def launch(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan(0.0)
    assert plan is not None
    scheduler.check_sums()
    return plan


def confirm(scheduler: Scheduler, plan: StepPlan) -> None:
    scheduler.apply(plan.step_no, np.full(int(plan.samples.sum()), 7, np.int32))
    scheduler.check_sums()


def run(scheduler: Scheduler) -> list[tuple[int, int]]:
    """Start and number of tokens of each step, of a request that runs alone."""
    steps = []
    while scheduler.has_work:
        plan = launch(scheduler)
        steps.append((int(plan.starts[0]), int(plan.counts[0])))
        confirm(scheduler, plan)
    return steps


def test_steps_leap_over_what_is_placed_and_the_first_one_copies_it() -> None:
    scheduler = ready_scheduler()
    scheduler.submit(asked())
    plan = launch(scheduler)
    assert (plan.starts[0], plan.counts[0]) == (0, 7)
    first, second = plan.placed
    assert (first.source_start, first.target_start, first.count, first.distance) == (2, 3, 10, 5)
    assert (second.source_start, second.target_start, second.count, second.distance) == (2, 2, 10, 20)
    assert first.sources.tolist() == second.sources.tolist()
    table = {int(column): int(block) for column, block in zip(plan.block_cols, plan.block_ids, strict=True)}
    assert first.targets.tolist() == [table[column] for column in (1, 2, 3, 4)]
    assert second.targets.tolist() == [table[column] for column in (5, 6, 7)]
    confirm(scheduler, plan)
    assert run(scheduler) == [(17, 5), (32, 6), (38, 1), (39, 1)]
    assert scheduler.pool.num_in_use == 0
    # Of this row only the block before the first placed token stays cached.
    scheduler.submit(asked(3))
    plan = launch(scheduler)
    assert (plan.starts[0], plan.counts[0]) == (4, 3)


def test_lost_copies_are_not_made_again_and_their_tokens_are_computed() -> None:
    scheduler = ready_scheduler()
    scheduler.submit(asked())
    launch(scheduler)
    scheduler.discard_in_flight()
    plan = launch(scheduler)
    assert (plan.starts[0], plan.counts[0], plan.placed) == (0, 38, ())
    scheduler.discard_in_flight()
    assert run(scheduler)[0] == (0, 38)


def test_copies_of_confirmed_steps_hold_after_a_failure() -> None:
    scheduler = ready_scheduler()
    scheduler.submit(asked())
    confirm(scheduler, launch(scheduler))
    launch(scheduler)
    scheduler.discard_in_flight()
    assert run(scheduler) == [(17, 5), (32, 6), (38, 1), (39, 1)]


def test_a_request_waits_for_a_document_that_is_being_computed() -> None:
    settings = SchedulerSettings(num_blocks=32, block_size=SIZE, max_running=4, token_budget=64)
    scheduler = Scheduler(settings)
    scheduler.submit(Request(1, TEXT, max_tokens=0))
    scheduler.submit(asked())
    plan = launch(scheduler)
    assert plan.counts.tolist() == [12]
    confirm(scheduler, plan)
    assert run(scheduler)[0] == (0, 7)


def test_without_blocks_or_cache_everything_is_computed() -> None:
    scheduler = ready_scheduler(num_blocks=11)  # The row needs ten, and the text has three.
    scheduler.submit(asked())
    assert sum(count for _, count in run(scheduler)) > 20
    scheduler = ready_scheduler()
    scheduler.submit(asked(read_cache=False))
    assert run(scheduler)[0] == (0, 38)


def test_a_row_that_leaves_before_its_first_step_gives_the_documents_back() -> None:
    scheduler = ready_scheduler()
    scheduler.submit(asked())
    chosen = scheduler.choose(0.0)
    assert chosen is not None
    scheduler.abort(2)
    scheduler.check_sums()
    assert scheduler.pool.num_in_use == 0
