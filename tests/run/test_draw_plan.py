"""Which rows of a step draw, in which head group, and when a repeated step may draw the same way."""

from __future__ import annotations

import numpy as np

from millrace.params.rows import RowParams
from millrace.params.sampling import SamplingParams
from millrace.plan.step import Admission, Bools, StepPlan, exact_shape
from millrace.run.sampling.draw_plan import NO_MASK, DrawPlan, plan_draws
from millrace.run.sampling.row_params import RowParamTable

NOTHING = np.zeros(0, np.int32)
KINDS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1e-7, top_k=4, top_p=0.5),
    SamplingParams(temperature=0.5),
    SamplingParams(temperature=0, presence_penalty=0.1),
    SamplingParams(temperature=0, logit_bias=((1, 1.0),)),
    SamplingParams(temperature=0, min_tokens=4),
    SamplingParams(temperature=0, logprobs=2),
]
GREEDY, SAMPLED, SHORT, SCORED = 0, 2, 5, 6


def draws_of(
    rows: list[int], start: int = 3, samples: Bools | None = None, masked: Bools | None = None, splits: bool = True
) -> DrawPlan:
    table = RowParamTable(max_rows=16, vocab_size=50)
    for row, kind in enumerate(KINDS):
        table.admit(Admission(row, row, np.arange(3, dtype=np.int32), 3, RowParams(kind, (7,))))
    chosen = np.array(rows, np.int32)
    plan = StepPlan(
        step_no=0, rows=chosen, starts=np.full_like(chosen, start), counts=np.ones_like(chosen),
        samples=np.ones(len(rows), np.bool_) if samples is None else samples,
        block_rows=NOTHING, block_cols=NOTHING, block_ids=NOTHING, shape=exact_shape(NOTHING), masked=masked,
    )  # fmt: skip
    return plan_draws(plan, table, is_split=splits)


def test_rows_that_need_logits_are_a_group_of_their_own() -> None:
    assert draws_of([0, 1]).groups == (("greedy", 2),)
    for row in (2, 3, 4, 5, 6):
        assert draws_of([row]).groups == (("full", 1),)
        draws = draws_of([0, row, 1])
        assert draws.groups == (("greedy", 2), ("full", 1))
        assert draws.full.tolist() == [1]
        assert draws.order is not None
        assert draws.order.tolist() == [1, 0, 2]
        assert draws_of([0, row, 1], splits=False).groups == (("full", 3),)


def test_only_rows_that_draw_are_in_a_group() -> None:
    draws = draws_of([GREEDY, SAMPLED, SCORED, GREEDY], samples=np.array([True, False, True, True]))
    assert draws.due.tolist() == [0, 2, 3]
    assert (draws.full.tolist(), draws.greedy.tolist()) == ([1], [0, 2])
    assert (draws.scored.tolist(), draws.num_logprobs.tolist()) == ([1], [2])
    assert draws_of([GREEDY], samples=np.array([False])).groups == ()


def test_a_minimum_length_ends() -> None:
    """The new token's position is start + 1; end tokens may be drawn from position 7 on."""
    assert draws_of([SHORT], start=5).groups == (("full", 1),)
    assert not draws_of([GREEDY, SHORT], start=5).is_reusable
    assert draws_of([SHORT], start=6).groups == (("greedy", 1),)
    assert draws_of([SHORT], start=6).is_reusable
    assert not draws_of([SAMPLED, SHORT], start=5).is_reusable, "a row may go to the greedy head later"


def test_masked_rows_need_logits_and_number_their_masks_in_plan_order() -> None:
    masked = np.array([False, True, True, False, True])
    samples = np.array([True, True, False, True, True])
    draws = draws_of([GREEDY, GREEDY, SAMPLED, SAMPLED, SCORED], samples=samples, masked=masked)
    assert draws.masked.tolist() == [1, 3]
    assert draws.full.tolist() == [1, 2, 3]
    assert draws.mask_lines().tolist() == [0, NO_MASK, 1]
    assert draws.is_reusable, "a step that repeats this one masks the same rows"
