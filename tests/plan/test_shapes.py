"""The choice of step shapes: which shape a step runs at, and which step or plan captures its graph."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from millrace.params import RowParams, SamplingParams
from millrace.plan.drafts import DraftSettings
from millrace.plan.request import Request
from millrace.plan.scheduler import Scheduler, SchedulerSettings
from millrace.plan.shapes.choice import ExactShapes, PaddedShapes, StepSizes
from millrace.plan.shapes.order import build_order, capture_order
from millrace.plan.shapes.table import ShapeFacts, ShapeTable
from millrace.plan.step import CapturePlan, HeadShape, StepPlan, StepShape

FACTS = ShapeFacts(max_rows=64, token_budget=256, queries_per_tile=32, block_size=16, can_capture=True)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def decoding(num_rows: int, shared_blocks: int = 0) -> StepSizes:
    ones = np.ones(num_rows, np.int32)
    return StepSizes(100 * ones, ones, 1, num_singles=len(ones), shared_blocks=shared_blocks)


def prompt(*counts: int, start: int = 0, scores: bool = False) -> StepSizes:
    sizes = ints(*counts)
    return StepSizes(np.full_like(sizes, start), sizes, int(sizes.max()), scores_prompts=scores, all_draw=False)


def captured(shapes: PaddedShapes) -> list[CapturePlan]:
    plans = []
    while (plan := shapes.captures.next()) is not None:
        plans.append(plan)
    return plans


def test_a_cpu_runs_steps_at_their_own_size() -> None:
    shapes = ExactShapes()
    assert shapes.choose(decoding(3)) == (StepShape(3, 3, 0, is_decode=True, is_exact=True), False)
    assert shapes.choose(prompt(1, 9)) == (StepShape(10, 2, 0, is_decode=False, is_exact=True), False)
    assert shapes.choose(replace(decoding(2), drafts=ints(3, 0)))[0].tokens == 5
    assert shapes.captures.next() is None


def test_the_second_step_at_a_shape_captures_it() -> None:
    shapes = PaddedShapes(FACTS)
    for sizes in (decoding(3), prompt(1, 100)):
        steps = [shapes.choose(sizes) for _ in range(4)]
        assert [captures for _, captures in steps] == [False, True, False, False]
        assert len({shape for shape, _ in steps}) == 1
    last, _ = shapes.choose(decoding(3))
    assert shapes.repeat(last, 3, 0) == (last, False)
    fresh, repeated = PaddedShapes(FACTS), []
    shape, captures = fresh.choose(decoding(3))
    for _ in range(3):
        shape, captures = fresh.repeat(shape, 3, 0)
        repeated.append(captures)
    assert repeated == [True, False, False], "a repeated step is a step"


def test_what_is_captured_when_idle_is_what_kernels_are_built_for() -> None:
    table = ShapeTable(replace(FACTS, has_drafts=True, can_share_prefix=True, takes_long_rows=True, max_context=1024))
    parts = capture_order(table)
    assert len(set(parts)) == len(parts)
    shapes = PaddedShapes(table.facts)
    assert shapes.captures.num_left == len(parts)
    assert [plan.shape for plan in captured(shapes)] == parts
    assert shapes.captures.num_left == 0
    long_rows = {part for part in parts if isinstance(part, StepShape) and part.long_from}
    assert len(long_rows) == 1024 // FACTS.token_budget
    assert set(parts) - long_rows <= set(build_order(table))
    assert not capture_order(ShapeTable(replace(FACTS, can_capture=False)))


def test_a_step_whose_shape_has_no_graph_uses_a_larger_one_until_it_is_captured() -> None:
    shapes = PaddedShapes(FACTS)
    # Nothing is captured yet, and nothing else will be: taking plans would count as capturing.
    shapes.captures._waiting.clear()
    shapes.captures.want(ShapeTable(FACTS).decode(32))
    assert len(captured(shapes)) == 1
    assert shapes.choose(decoding(17))[0].rows == 32
    assert shapes.choose(decoding(24))[0].rows == 32
    shape, captures = shapes.choose(decoding(12))
    assert (shape.rows, captures) == (32, False)
    assert shapes.repeat(shape, 12, 0)[0].rows == 32
    assert {plan.shape.rows for plan in captured(shapes)} == {16, 24}
    assert shapes.repeat(shape, 12, 0) == (ShapeTable(FACTS).decode(12), False)
    assert shapes.choose(decoding(3))[0].rows == 4, "32 rows would be too much padding"


def test_a_runner_that_cannot_capture_gets_the_shapes_themselves() -> None:
    shapes = PaddedShapes(FACTS)
    shapes.captures.stop()
    shapes.captures.want(HeadShape(4, "full"))
    assert captured(shapes) == []
    assert [shapes.choose(decoding(17)) for _ in range(3)] == 3 * [(ShapeTable(FACTS).decode(17), False)]


def test_steps_with_adapters_have_graphs_of_their_own() -> None:
    """Steps without any run what they would run on a server without adapters."""
    shapes, plain = PaddedShapes(replace(FACTS, takes_adapters=True)), PaddedShapes(FACTS)
    drafted = replace(decoding(2), drafts=ints(1, 0))
    for sizes in (decoding(3), drafted, prompt(1, 100), prompt(1, 9, scores=True)):
        shape, _ = shapes.choose(sizes)
        assert shape == plain.choose(sizes)[0]
        adapted, captures = shapes.choose(replace(sizes, adapters=True))
        assert (adapted, captures) == (replace(shape, adapters=True), False)
    last, captures = shapes.choose(replace(decoding(3), adapters=True))
    assert captures
    assert shapes.repeat(last, 3, 0) == (last, False)
    parts = [plan.shape for plan in captured(PaddedShapes(replace(FACTS, takes_adapters=True)))]
    assert [part for part in parts if not getattr(part, "adapters", False)] == [one.shape for one in captured(plain)]
    assert shapes.choose(replace(decoding(16), adapters=True))[0] in parts


def test_split_kv_and_long_rows_wait_for_their_graphs() -> None:
    facts = replace(FACTS, max_parts=(8,) * 8, takes_long_rows=True, max_context=1024)
    shapes = PaddedShapes(facts)
    cold = [shapes.choose(prompt(20, start=600))[0], shapes.choose(prompt(256, start=256))[0]]
    assert [(shape.parts, shape.long_from) for shape in cold] == [(1, 0), (1, 0)]
    captured(shapes)
    warm = [shapes.choose(prompt(20, start=600))[0], shapes.choose(prompt(256, start=256))[0]]
    assert [(shape.parts, shape.long_from) for shape in warm] == [(8, 0), (1, 256)]
    assert shapes.choose(prompt(256, start=100))[0].long_from == 0, "not after full chunks"


def test_steps_that_score_prompts_are_exact() -> None:
    shapes = PaddedShapes(FACTS)
    for counts in ((1, 1), (1, 40), (100,)):
        shape, captures = shapes.choose(prompt(*counts, scores=True))
        assert (shape.is_exact, shape.is_decode, shape.last_only, captures) == (True, False, False, False)
        assert (shape.tokens, shape.rows) == (sum(counts), len(counts))


def test_rows_that_share_enough_of_a_prefix_share_its_reads() -> None:
    shapes = PaddedShapes(replace(FACTS, can_share_prefix=True))
    captured(shapes)
    assert not shapes.choose(decoding(16, shared_blocks=15))[0].shares_prefix
    shape, _ = shapes.choose(decoding(16, shared_blocks=16))
    assert shape.shares_prefix
    assert shapes.repeat(shape, 16, 16) == (shape, False)
    assert not shapes.repeat(shape, 16, 0)[0].shares_prefix
    assert not shapes.choose(decoding(15, shared_blocks=16))[0].shares_prefix


def test_places_of_drafts_are_part_of_a_decode_shape() -> None:
    shapes = PaddedShapes(replace(FACTS, has_drafts=True))
    for drafts, places in ((0, 1), (1, 2), (2, 4), (5, 8)):
        shape, _ = shapes.choose(replace(decoding(4), drafts=np.full(4, drafts, np.int32)))
        assert (shape.rows, shape.places, shape.tokens) == (4, places, 4 * places)
    beside_a_prompt = replace(prompt(1, 9), drafts=ints(3, 0))
    assert shapes.choose(beside_a_prompt)[0].places == 0


def test_plans_carry_the_shapes_of_the_choice() -> None:
    scheduler = Scheduler(
        SchedulerSettings(num_blocks=64, block_size=16, max_running=8, token_budget=256), shapes=PaddedShapes(FACTS)
    )
    for index in range(3):
        scheduler.submit(Request(id=index, prompt=np.full(40, index, np.int32), max_tokens=9))
    plans: list[StepPlan] = []
    while (plan := scheduler.plan(0.0)) is not None:
        plans.append(plan)
        scheduler.apply(plan.step_no, np.full(int(plan.samples.sum()), 7, np.int32))
    assert [plan.shape.is_decode for plan in plans] == [False] + 8 * [True]
    assert {plan.shape.rows for plan in plans[1:]} == {4}
    assert [plan.captures for plan in plans] == [False, False, True] + 6 * [False]


@pytest.mark.parametrize("params", [SamplingParams(prompt_logprobs=0), SamplingParams(max_tokens=0, pooling="last")])
@pytest.mark.parametrize("max_drafts", [0, 3])
def test_a_row_that_draws_nothing_is_in_no_decode_shape(params: SamplingParams, max_drafts: int) -> None:
    """Every row of a decode shape draws, and one with places is computed only below its limit."""
    scheduler = Scheduler(
        SchedulerSettings(
            num_blocks=64, block_size=16, max_running=8, token_budget=256, drafts=DraftSettings(max_drafts, 8)
        ),
        shapes=PaddedShapes(replace(FACTS, has_drafts=bool(max_drafts))),
    )
    scheduler.submit(Request(0, np.arange(3, dtype=np.int32), max_tokens=20))
    first = scheduler.plan(0.0)
    assert first is not None
    scheduler.apply(first.step_no, np.array([7], np.int32))
    scheduler.submit(Request(1, np.array([5], np.int32), max_tokens=0, row_params=RowParams(params)))
    plan = scheduler.plan(1.0)
    assert plan is not None
    assert plan.counts.tolist() == [1, 1]
    assert plan.samples.tolist() == [True, False]
    assert not plan.shape.is_decode
    outcome = scheduler.apply(plan.step_no, np.array([7], np.int32), None if plan.draft_places is None else ints(1))
    assert [(event.request_id, event.reason) for event in outcome.ended] == [(1, "stop")]
    last = scheduler.plan(2.0)
    assert last is not None
    assert last.shape.is_decode
    assert last.rows.tolist() == [0]
