"""Token budgets: prompt tokens up to the token budget plus one per decoding row; the mixed budget keeps steps short."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.inside import part_of

from millrace.plan.budget import EFFICIENT_CHUNK, StepTarget
from millrace.plan.pacing.step_time import StepRates
from millrace.plan.request import Request
from millrace.plan.scheduler import Scheduler, SchedulerSettings
from millrace.plan.step import StepPlan

BUDGET, ROWS, PROMPT = 8192, 512, 512


def a_prompt(request_id: int, length: int) -> Request:
    tokens = np.arange(length, dtype=np.int32) + request_id * length
    return Request(id=request_id, prompt=tokens, max_tokens=128)


def a_scheduler(
    token_budget: int = BUDGET, mixed_budget: int = 0, max_running: int = ROWS, target: StepTarget | None = None
) -> Scheduler:
    return Scheduler(
        SchedulerSettings(
            num_blocks=16_384,
            block_size=16,
            max_running=max_running,
            token_budget=token_budget,
            mixed_budget=mixed_budget,
            target=target,
        )
    )


def confirm(scheduler: Scheduler, plan: StepPlan) -> None:
    scheduler.apply(plan.step_no, np.full(int(plan.samples.sum()), 7, np.int32))


def steps_until_all_decode(scheduler: Scheduler, num_requests: int) -> list[StepPlan]:
    """Plans each step while the previous one is in flight, as the engine does."""
    for request_id in range(num_requests):
        scheduler.submit(a_prompt(request_id, PROMPT))
    steps: list[StepPlan] = []
    for now in range(100):
        plan = scheduler.plan(float(now))
        assert plan is not None
        if len(plan.rows) == num_requests and plan.counts.max() == 1:
            return steps
        if steps:
            confirm(scheduler, steps[-1])
        steps.append(plan)
    pytest.fail("some requests never decode")


@pytest.mark.parametrize(
    ("num_requests", "mixed_budget", "num_steps"),
    [(32, 0, 2), (32, 2048, 2), (128, 0, 8), (128, 3072, 8), (256, 0, 16), (256, 3072, 18), (256, 2048, 20)],
)
def test_prompts_that_fill_a_step_are_not_split_for_decoding_rows(
    num_requests: int, mixed_budget: int, num_steps: int
) -> None:
    steps = steps_until_all_decode(a_scheduler(mixed_budget=mixed_budget), num_requests)
    assert len(steps) == num_steps
    whole = steps if mixed_budget == 0 or num_requests < 256 else steps[:15]
    assert all(step.counts[step.counts > 1].tolist() == [PROMPT] * 16 for step in whole)
    short = steps[len(whole) :]
    assert all(step.num_tokens <= mixed_budget for step in short)


def test_every_decoding_row_is_in_every_step_for_any_budget() -> None:
    scheduler = a_scheduler(token_budget=4, max_running=6)
    for request_id in range(6):
        scheduler.submit(a_prompt(request_id, 2))
    for now in range(8):
        plan = scheduler.plan(float(now))
        assert plan is not None
        confirm(scheduler, plan)
    assert plan.counts.tolist() == [1] * 6
    scheduler.abort(0)
    scheduler.submit(a_prompt(6, 11))
    counts = []
    for now in range(8, 11):
        plan = scheduler.plan(float(now))
        assert plan is not None
        counts.append(plan.counts.tolist())
        confirm(scheduler, plan)
    assert counts == [[1] * 5 + [4], [1] * 5 + [4], [1] * 5 + [3]]


@pytest.mark.parametrize(("num_streams", "chunk"), [(1, 31), (8, 24), (30, 8), (40, 8)])
def test_the_mixed_budget_counts_decoding_rows_and_reserves_a_quarter(num_streams: int, chunk: int) -> None:
    scheduler = a_scheduler(token_budget=128, mixed_budget=32, max_running=64)
    for request_id in range(num_streams):
        scheduler.submit(a_prompt(request_id, 3))
    for now in range(num_streams):
        plan = scheduler.plan(float(now))
        assert plan is not None
        confirm(scheduler, plan)
    scheduler.submit(a_prompt(num_streams, 500))
    plan = scheduler.plan(100.0)
    assert plan is not None
    assert plan.counts.tolist() == [1] * num_streams + [chunk]


def test_a_prompt_is_split_at_multiples_of_the_budget() -> None:
    """Also after a prefix hit: the later chunks are whole."""
    scheduler = a_scheduler()
    known = np.arange(2000, dtype=np.int32)
    scheduler.submit(Request(id=0, prompt=known, max_tokens=1))
    plan = scheduler.plan(0.0)
    assert plan is not None
    confirm(scheduler, plan)
    longer = np.concatenate((known, np.arange(50_000, 70_000, dtype=np.int32)))
    scheduler.submit(Request(id=1, prompt=longer, max_tokens=1))
    starts, counts = [], []
    for now in range(1, 4):
        plan = scheduler.plan(float(now))
        assert plan is not None
        starts += plan.starts.tolist()
        counts += plan.counts.tolist()
        confirm(scheduler, plan)
    assert starts == [2000, BUDGET, 2 * BUDGET]
    assert counts == [BUDGET - 2000, BUDGET, 22_000 - 2 * BUDGET]
    assert plan.samples.all()


def test_a_split_that_reaches_no_multiple_uses_the_whole_budget() -> None:
    scheduler = a_scheduler()
    scheduler.submit(a_prompt(0, 2000))
    scheduler.submit(a_prompt(1, 20_000))
    counts = []
    for now in range(3):
        plan = scheduler.plan(float(now))
        assert plan is not None
        counts.append(plan.counts[plan.counts > 1].tolist())
        confirm(scheduler, plan)
    assert counts == [[2000, BUDGET - 2000], [2000], [BUDGET]]


def test_chunks_beside_streams_grow_by_twice_what_was_measured() -> None:
    """The first rates are guesses: far too low ones must not make a step of a thousand tokens."""
    target = StepTarget(0.2, StepRates(1e-3, 1e-6, 1e-6, 1e-9, 1e-9), first_chunk=64)
    scheduler = a_scheduler(target=target)
    scheduler.submit(a_prompt(0, 20))
    for now in range(2):
        step(scheduler, float(now), seconds=0.03)
    scheduler.submit(a_prompt(1, 3000))
    counts = [step(scheduler, float(now), seconds=1e-3).counts.tolist()[-1] for now in range(2, 6)]
    assert counts == [64, 128, 256, 512]


def step(scheduler: Scheduler, now: float, *, seconds: float) -> StepPlan:
    plan = scheduler.plan(now)
    assert plan is not None
    confirm(scheduler, plan)
    scheduler.observe_step(plan, seconds)
    return plan


def test_a_preempted_request_is_recomputed_in_chunks_by_time_too() -> None:
    """Its tokens beside a stream take as long as those of a prompt."""
    token_s = 1e-3
    scheduler = a_scheduler(target=StepTarget(200 * token_s, StepRates(1e-3, token_s, token_s, 1e-9, 1e-9)))

    def next_counts() -> list[int]:
        plan = scheduler.plan(0.0)
        assert plan is not None
        confirm(scheduler, plan)
        scheduler.observe_step(plan, token_s * plan.num_tokens)
        counts: list[int] = plan.counts.tolist()
        return counts

    scheduler.submit(a_prompt(0, 20))
    scheduler.submit(Request(id=1, prompt=np.arange(1000, dtype=np.int32), max_tokens=128, read_cache=False))
    while next_counts() != [1, 1]:
        pass
    # No public call preempts a chosen row.
    part_of(scheduler, "preempting").preempt(1, "a test")
    chunks = [next_counts()[1] for _ in range(4)]
    assert all(1 < count < 300 for count in chunks), chunks


TOKEN_S = 1e-3
EXACT = StepTarget(100 * TOKEN_S, StepRates(TOKEN_S, TOKEN_S, TOKEN_S, 1e-9, 1e-9), uncertainty=0.05)


def chunks_beside_a_stream(scheduler: Scheduler, slowness: list[float]) -> list[int]:
    """Tokens of a long prompt in each step, which takes so many times as long as the rates say."""
    scheduler.submit(a_prompt(0, 20))
    step(scheduler, 0.0, seconds=21 * TOKEN_S)
    scheduler.submit(a_prompt(1, 4000))
    counts = []
    for factor in slowness:
        plan = scheduler.plan(1.0)
        assert plan is not None
        confirm(scheduler, plan)
        scheduler.observe_step(plan, factor * (1 + plan.num_tokens) * TOKEN_S)
        counts.append(plan.counts.tolist()[-1])
    return counts


def test_chunks_shrink_at_once_while_the_machine_is_slow() -> None:
    counts = chunks_beside_a_stream(a_scheduler(target=EXACT), [1.0, 1.0, 1.8, 1.8, 1.0, 1.0, 1.0, 1.0, 1.0])
    assert counts[:3] == pytest.approx([98, 98, 98], abs=2)
    assert counts[3] == pytest.approx(98 / 1.4, rel=0.1)
    assert counts[4] < counts[3] < counts[-1]
    assert counts[-1] > 90


def test_small_chunks_are_not_cut_to_reach_a_multiple_of_the_budget() -> None:
    counts = chunks_beside_a_stream(a_scheduler(token_budget=512, target=EXACT), [1.0] * 30)
    assert min(counts) >= 98 / 2


LONG_CONTEXT = StepRates(step_s=0.1, prompt_token_s=6e-3, decode_row_s=6e-3, context_token_s=1e-6, pair_s=1.5e-6)
"""A small CPU: at 18,000 tokens of context a token of a prompt takes six times as long as at the start."""


def predicted_s(plan: StepPlan) -> float:
    """By `LONG_CONTEXT`."""
    pairs = float((plan.counts * (plan.starts + plan.counts / 2)).sum())
    return LONG_CONTEXT.step_s + LONG_CONTEXT.prompt_token_s * plan.num_tokens + LONG_CONTEXT.pair_s * pairs


@pytest.mark.parametrize("slowness", [1.0, 2.0, 8.0])
def test_chunks_of_a_prompt_that_runs_alone_stay_efficient(slowness: float) -> None:
    """Neither a long context nor a machine that became slower shrinks them: no stream's pace is to be kept."""
    scheduler = a_scheduler(token_budget=512, target=StepTarget(0.2, LONG_CONTEXT, first_chunk=64))
    scheduler.submit(a_prompt(0, 18_800))
    chunks = []
    while True:
        plan = scheduler.plan(float(len(chunks)))
        assert plan is not None
        scheduler.budget.observe(plan, slowness * predicted_s(plan))
        confirm(scheduler, plan)
        chunks.append(plan.num_tokens)
        if plan.samples.any():
            break
    # Now and then one is cut to end at a multiple of the token budget.
    assert min(chunks[:-1]) >= EFFICIENT_CHUNK // 2
    assert np.median(chunks) >= EFFICIENT_CHUNK


def test_a_slower_machine_shortens_chunks_beside_a_stream() -> None:
    """The pace of the stream is kept, down to the least that a prompt gets."""
    scheduler = a_scheduler(token_budget=512, target=StepTarget(0.2, LONG_CONTEXT))
    scheduler.submit(a_prompt(0, 20))
    for now in range(2):
        plan = scheduler.plan(float(now))
        assert plan is not None
        confirm(scheduler, plan)
    scheduler.submit(a_prompt(1, 3000))
    plan = scheduler.plan(2.0)
    assert plan is not None
    assert plan.counts.tolist() == [1, 16]
