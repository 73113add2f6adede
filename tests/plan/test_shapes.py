"""The choice of step shapes: which shape a step runs at, and which step or plan captures its graph."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from millrace.params.rows import RowParams
from millrace.params.sampling import SamplingParams
from millrace.plan.drafts import DraftSettings
from millrace.plan.request import Request
from millrace.plan.scheduler import Scheduler, SchedulerSettings
from millrace.plan.shapes.choice import ShapeChoice
from millrace.plan.shapes.declared import StepSizes
from millrace.plan.shapes.heads import DueRows
from millrace.plan.step import CapturePlan, DrawShape, HeadShape, StepPlan, StepShape
from millrace.run.shapes.keys import ShapeKey
from millrace.run.shapes.order import build_order, capture_order
from millrace.run.shapes.padded import PaddedShapes
from millrace.run.shapes.table import ShapeFacts, ShapeTable

FACTS = ShapeFacts(max_rows=64, token_budget=256, queries_per_tile=32, block_size=16, can_capture=True)


TABLE = ShapeTable(FACTS)


def choice_of(facts: ShapeFacts = FACTS) -> ShapeChoice:
    return ShapeChoice(PaddedShapes(facts))


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def decoding(num_rows: int, shared_blocks: int = 0) -> StepSizes:
    ones = np.ones(num_rows, np.int32)
    return StepSizes(100 * ones, ones, 1, num_singles=len(ones), shared_blocks=shared_blocks)


def prompt(*counts: int, start: int = 0, scores: bool = False) -> StepSizes:
    sizes = ints(*counts)
    return StepSizes(np.full_like(sizes, start), sizes, int(sizes.max()), scores_prompts=scores, all_draw=False)


def captured(shapes: ShapeChoice) -> list[CapturePlan]:
    plans = []
    while (plan := shapes.captures.next()) is not None:
        plans.append(plan)
    return plans


def test_a_cpu_runs_steps_at_their_own_size() -> None:
    shapes = ShapeChoice()
    assert shapes.choose(decoding(3)) == (StepShape("exact", 3, 3), False)
    assert shapes.choose(prompt(1, 9)) == (StepShape("exact", 10, 2), False)
    assert shapes.choose(replace(decoding(2), drafts=ints(3, 0)))[0].tokens == 5
    assert shapes.captures.next() is None


def test_the_second_step_at_a_shape_captures_it() -> None:
    shapes = choice_of()
    for sizes in (decoding(3), prompt(1, 100)):
        steps = [shapes.choose(sizes) for _ in range(4)]
        assert [captures for _, captures in steps] == [False, True, False, False]
        assert len({shape for shape, _ in steps}) == 1
    last, _ = shapes.choose(decoding(3))
    assert shapes.repeat(last, 3, 0) == (last, False)
    fresh, repeated = choice_of(), []
    shape, captures = fresh.choose(decoding(3))
    for _ in range(3):
        shape, captures = fresh.repeat(shape, 3, 0)
        repeated.append(captures)
    assert repeated == [True, False, False], "a repeated step is a step"


def test_what_is_captured_when_idle_is_what_kernels_are_built_for() -> None:
    table = ShapeTable(replace(FACTS, has_drafts=True, can_share_prefix=True, takes_long_rows=True, max_context=1024))
    parts = capture_order(table)
    assert len(set(parts)) == len(parts)
    shapes = choice_of(table.facts)
    assert shapes.captures.num_left == len(parts)
    assert [plan.shape for plan in captured(shapes)] == parts
    assert shapes.captures.num_left == 0
    long_rows = {part for part in parts if isinstance(part, StepShape) and table.key_of(part).long_from}
    assert len(long_rows) == 1024 // FACTS.token_budget
    assert set(parts) - long_rows <= set(build_order(table))
    assert not capture_order(ShapeTable(replace(FACTS, can_capture=False)))


def test_a_step_whose_shape_has_no_graph_uses_a_larger_one_until_it_is_captured() -> None:
    shapes = choice_of()
    # Nothing is captured yet, and nothing else will be: taking plans would count as capturing.
    shapes.captures.waiting.clear()
    shapes.captures.want(TABLE.decode(32))
    assert len(captured(shapes)) == 1
    assert shapes.choose(decoding(17))[0].rows == 32
    assert shapes.choose(decoding(24))[0].rows == 32
    shape, captures = shapes.choose(decoding(12))
    assert (shape.rows, captures) == (32, False)
    assert shapes.repeat(shape, 12, 0)[0].rows == 32
    assert {plan.shape.rows for plan in captured(shapes)} == {16, 24}
    assert shapes.repeat(shape, 12, 0) == (TABLE.decode(12), False)
    assert shapes.choose(decoding(3))[0].rows == 4, "32 rows would be too much padding"


def test_a_runner_that_cannot_capture_gets_the_shapes_themselves() -> None:
    shapes = choice_of()
    shapes.captures.stop()
    shapes.captures.want(HeadShape(4, "full"))
    assert captured(shapes) == []
    assert [shapes.choose(decoding(17)) for _ in range(3)] == 3 * [(TABLE.decode(17), False)]


def test_steps_with_adapters_have_graphs_of_their_own() -> None:
    """Steps without any run what they would run on a server without adapters."""
    facts = replace(FACTS, takes_adapters=True)
    shapes, plain, table = choice_of(facts), choice_of(), ShapeTable(facts)
    drafted = replace(decoding(2), drafts=ints(1, 0))
    for sizes in (decoding(3), drafted, prompt(1, 100), prompt(1, 9, scores=True)):
        shape, _ = shapes.choose(sizes)
        assert shape == plain.choose(sizes)[0]
        adapted, captures = shapes.choose(replace(sizes, adapters=2))
        assert replace(adapted, key=shape.key) == shape
        assert (table.key_of(adapted), captures) == (replace(table.key_of(shape), adapters=2), False)
    last, captures = shapes.choose(replace(decoding(3), adapters=2))
    assert captures
    assert shapes.repeat(last, 3, 0) == (last, False)
    parts = [plan.shape for plan in captured(choice_of(facts))]
    without = [part for part in parts if isinstance(part, HeadShape) or not table.key_of(part).adapters]
    assert without == [one.shape for one in captured(plain)]
    assert shapes.choose(replace(decoding(16), adapters=1))[0] in parts


def test_split_kv_and_long_rows_wait_for_their_graphs() -> None:
    facts = replace(FACTS, max_parts=(8,) * 8, takes_long_rows=True, max_context=1024)
    shapes = choice_of(facts)
    table = ShapeTable(facts)

    def key(sizes: StepSizes) -> ShapeKey:
        return table.key_of(shapes.choose(sizes)[0])

    short, chunk, chunk_and_row = prompt(20, start=600), prompt(256, start=256), prompt(1, 256, start=256)
    assert [(key(sizes).parts, key(sizes).long_from) for sizes in (short, chunk, chunk_and_row)] == [(1, 0)] * 3
    captured(shapes)
    warm = [key(sizes) for sizes in (short, chunk, chunk_and_row)]
    assert [(own.parts, own.long_from, own.context) for own in warm] == [(8, 0, 0), (1, 256, 256), (1, 256, 0)]
    assert key(prompt(256, start=100)).long_from == 0, "not after full chunks"


def test_steps_that_score_prompts_are_exact() -> None:
    shapes = choice_of()
    for counts in ((1, 1), (1, 40), (100,)):
        shape, captures = shapes.choose(prompt(*counts, scores=True))
        assert (shape.kind, TABLE.key_of(shape).last_only, captures) == ("exact", False, False)
        assert (shape.tokens, shape.rows) == (sum(counts), len(counts))


def test_rows_that_share_enough_of_a_prefix_share_its_reads() -> None:
    shapes, plain, sharing = choice_of(replace(FACTS, can_share_prefix=True)), TABLE.plain, TABLE.sharing
    captured(shapes)
    assert TABLE.keys[sharing].shares_prefix
    assert shapes.choose(decoding(16, shared_blocks=15))[0].key == plain
    shape, _ = shapes.choose(decoding(16, shared_blocks=16))
    assert shape.key == sharing
    assert shapes.repeat(shape, 16, 16) == (shape, False)
    assert shapes.repeat(shape, 16, 0)[0].key == plain
    assert shapes.choose(decoding(15, shared_blocks=16))[0].key == plain


def test_places_of_drafts_are_part_of_a_decode_shape() -> None:
    shapes = choice_of(replace(FACTS, has_drafts=True))
    for drafts, places in ((0, 1), (1, 2), (2, 4), (5, 8)):
        shape, _ = shapes.choose(replace(decoding(4), drafts=np.full(4, drafts, np.int32)))
        assert (shape.rows, shape.places, shape.tokens) == (4, places, 4 * places)
    beside_a_prompt = replace(prompt(1, 9), drafts=ints(3, 0))
    assert shapes.choose(beside_a_prompt)[0].places == 0


def test_plans_carry_the_shapes_of_the_choice() -> None:
    scheduler = Scheduler(
        SchedulerSettings(num_blocks=64, block_size=16, max_running=8, token_budget=256), shapes=choice_of()
    )
    for index in range(3):
        scheduler.submit(Request(id=index, prompt=np.full(40, index, np.int32), max_tokens=9))
    plans: list[StepPlan] = []
    while (plan := scheduler.plan(0.0)) is not None:
        plans.append(plan)
        scheduler.apply(plan.step_no, np.full(int(plan.samples.sum()), 7, np.int32))
    assert [plan.shape.kind for plan in plans] == ["mixed"] + 8 * ["decode"]
    assert {plan.shape.rows for plan in plans[1:]} == {4}
    assert {plan.draw for plan in plans} == {DrawShape(full=4)}
    assert [len(plan.captures) for plan in plans] == [0, 1, 1] + 6 * [0], "the head ran before its shape did"


@pytest.mark.parametrize("params", [SamplingParams(prompt_logprobs=0), SamplingParams(max_tokens=0, pooling="last")])
@pytest.mark.parametrize("max_drafts", [0, 3])
def test_a_row_that_draws_nothing_is_in_no_decode_shape(params: SamplingParams, max_drafts: int) -> None:
    """Every row of a decode shape draws, and one with places is computed only below its limit."""
    scheduler = Scheduler(
        SchedulerSettings(
            num_blocks=64, block_size=16, max_running=8, token_budget=256, drafts=DraftSettings(max_drafts, 8)
        ),
        shapes=choice_of(replace(FACTS, has_drafts=bool(max_drafts))),
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
    assert plan.shape.kind != "decode"
    outcome = scheduler.apply(plan.step_no, np.array([7], np.int32), None if plan.draft_places is None else ints(1))
    assert [(event.request_id, event.reason) for event in outcome.ended] == [(1, "stop")]
    last = scheduler.plan(2.0)
    assert last is not None
    assert last.shape.kind == "decode"
    assert last.rows.tolist() == [0]


def head_choice(**facts: object) -> tuple[ShapeChoice, StepShape]:
    shapes = choice_of(replace(FACTS, **facts))  # type: ignore[arg-type]
    shapes.captures.waiting.clear()
    return shapes, TABLE.decode(8)


def test_heads_are_chosen_for_every_rank() -> None:
    """Greedy rows have a head of their own where that is worth it; the second use of a head captures it."""
    shapes, shape = head_choice(min_split=3, greedy_heads=(4, 8))
    assert shapes.heads(DueRows(0), shape) == (DrawShape(), ())
    mixed = [shapes.heads(DueRows(6, 2), shape) for _ in range(3)]
    assert [draw for draw, _ in mixed] == 3 * [DrawShape(full=2, greedy=4)]
    assert [captured for _, captured in mixed] == [(), (HeadShape(2, "full"), HeadShape(4, "greedy")), ()]
    assert shapes.heads(DueRows(6, 4), shape)[0] == DrawShape(full=8), "two greedy rows are not worth a head"
    assert shapes.heads(DueRows(3, 3), TABLE.decode(4, places=4))[0] == DrawShape(full=16), "one state for each place"
    assert shapes.heads(DueRows(3), prompt_shape := TABLE.all_mixed()[0])[0] == DrawShape(greedy=4)
    assert prompt_shape.kind == "mixed"
    assert ShapeChoice().heads(DueRows(3), shape) == (DrawShape(), ())


def test_a_head_without_a_graph_is_a_larger_one_until_it_is_captured() -> None:
    shapes, shape = head_choice()
    shapes.captures.want(HeadShape(8, "full"))
    assert len(captured(shapes)) == 1
    assert shapes.heads(DueRows(4, 4), shape) == (DrawShape(full=8), ())
    assert shapes.heads(DueRows(4), shape) == (DrawShape(greedy=4), ()), "that head is another one"
    assert [plan.shape for plan in captured(shapes)] == [HeadShape(4, "full")]
    assert shapes.heads(DueRows(4, 4), shape) == (DrawShape(full=4), ())


def test_a_draw_waits_on_the_device_only_if_its_heads_have_graphs() -> None:
    shapes, shape = head_choice(waits_above=2)
    assert (shapes.can_wait(2), shapes.can_wait(3), choice_of().can_wait(3)) == (False, True, False)
    due = DueRows(4, 4, can_wait=True)
    assert [shapes.heads(due, shape)[0].waits for _ in range(3)] == [False, False, True]
    assert shapes.heads(due, TABLE.decode(2, places=2))[0].waits is False
    assert shapes.heads(DueRows(4, 4), shape)[0] == DrawShape(full=4)
    shapes.captures.stop()
    assert shapes.heads(due, shape)[0].waits is False


def test_ranks_with_the_same_shapes_have_the_same_digest() -> None:
    """Graphs are each rank's own; everything that a plan may name is not."""
    digest = PaddedShapes(FACTS).digest
    assert PaddedShapes(replace(FACTS, can_capture=False)).digest == digest
    others = [{"max_rows": 65}, {"waits_above": 16}, {"greedy_heads": (8,)}, {"max_parts": (8,) * 8}]
    others.append({"sizes": replace(FACTS.sizes, split_context=1)})
    assert len({digest, *(PaddedShapes(replace(FACTS, **own)).digest for own in others)}) == 1 + len(others)  # type: ignore[arg-type]
