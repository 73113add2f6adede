"""A step is divided between tenants and classes: who asks for little is served in every step, and nobody starves."""

from __future__ import annotations

import random

import numpy as np
import pytest
from helpers.suite import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.plan.budget import StepTarget
from millrace.plan.pacing.step_time import StepRates
from millrace.plan.request import BATCH, INTERACTIVE, STANDARD, Request
from millrace.plan.row_choice import MAX_TURNS
from millrace.plan.scheduler import Scheduler, SchedulerSettings
from millrace.plan.step import StepPlan

RATES = StepRates(step_s=0.02, prompt_token_s=0.008, decode_row_s=0.008, context_token_s=1e-9, pair_s=1e-9)
"""22 rows take 0.2 s, and 60 rows take 0.5 s."""
OUTPUT = 400


def a_scheduler(step_s: float = 0.2, token_budget: int = 4096, num_blocks: int = 100_000) -> Scheduler:
    return Scheduler(
        SchedulerSettings(
            num_blocks=num_blocks,
            block_size=16,
            max_running=128,
            token_budget=token_budget,
            prefix_cache=False,
            target=StepTarget(step_s, RATES) if step_s else None,
        )
    )


def a_request(number: int, tenant: str, num_prompt: int = 2, **more: object) -> Request:
    return Request(id=number, prompt=np.full(num_prompt, number, np.int32), max_tokens=OUTPUT, tenant=tenant, **more)


def step(scheduler: Scheduler, now: float = 0.0) -> StepPlan:
    plan = scheduler.plan(now)
    assert plan is not None
    scheduler.apply(plan.step_no, np.full(int(plan.samples.sum()), 7, np.int32))
    return plan


def settle(scheduler: Scheduler) -> None:
    """Until every request has its first token."""
    for _ in range(1000):
        rows = scheduler.rows
        if not len(scheduler.waiting) and (rows.known_host[rows.order] > rows.num_prompt[rows.order]).all():
            return
        step(scheduler)
    pytest.fail("some requests never decode")


def tenants(scheduler: Scheduler, plan: StepPlan) -> dict[str, int]:
    """Decoding rows in the step, by holder of their share."""
    found: dict[str, int] = {}
    for row in plan.rows[plan.counts == 1].tolist():
        holder = scheduler.rows.request(row).holder
        found[holder] = found.get(holder, 0) + 1
    return found


def started(counts: dict[str, int], step_s: float = 0.2, **more: dict[str, object]) -> Scheduler:
    scheduler = a_scheduler(step_s)
    numbers = iter(range(10_000))
    for tenant, count in counts.items():
        for _ in range(count):
            scheduler.submit(a_request(next(numbers), tenant, **more.get(tenant, {})))
    settle(scheduler)
    return scheduler


def test_a_small_tenant_is_in_every_short_step_and_the_other_takes_turns() -> None:
    scheduler = started({"a": 60, "b": 2})
    seen: dict[int, int] = {}
    for number in range(30):
        plan = step(scheduler)
        assert tenants(scheduler, plan) == {"a": 20, "b": 2}
        for row in plan.rows.tolist():
            seen[row] = seen.get(row, 0) + 1
        if number % 3 == 2:
            assert set(seen.values()) <= {number + 1, (number + 1) // 3}


@pytest.mark.parametrize(
    ("counts", "step_s"),
    [
        ({"a": 60}, 0.2),
        ({"a": 60, "b": 2}, 0.0),
        ({"a": 12, "b": 8}, 0.2),
        ({"a": 40, "b": 40}, 0.2),
    ],
    ids=["one tenant", "no target", "all rows fit", "both ask for more than their share"],
)
def test_otherwise_every_row_is_in_every_step(counts: dict[str, int], step_s: float) -> None:
    scheduler = started(counts, step_s)
    for _ in range(5):
        assert tenants(scheduler, step(scheduler)) == counts


def test_weights_decide_between_tenants_that_ask_for_more_than_fits() -> None:
    scheduler = started({"a": 60, "b": 60}, b={"weight": 3.0})
    assert tenants(scheduler, step(scheduler)) == {"a": 20, "b": 60}


def test_shares_of_adapters_are_not_those_of_their_tenants() -> None:
    """Two adapters of one tenant, and one adapter of two tenants."""
    scheduler, numbers = a_scheduler(0.2), iter(range(1000))
    for tenant, adapter, weight in (("a", "pirate", 1.0), ("a", "legal", 3.0), ("b", "legal", 3.0)):
        for _ in range(60 if adapter == "pirate" else 30):
            scheduler.submit(a_request(next(numbers), tenant, share_of=adapter, weight=weight))
    settle(scheduler)
    assert tenants(scheduler, step(scheduler)) == {"pirate": 20, "legal": 60}


def test_an_urgent_class_of_the_same_tenant_goes_first() -> None:
    scheduler = a_scheduler()
    for number in range(60):
        scheduler.submit(a_request(number, "a", priority=BATCH if number else INTERACTIVE))
    settle(scheduler)
    for _ in range(5):
        plan = step(scheduler)
        assert len(plan.rows) < 30
        assert 0 in scheduler.rows.request_ids[plan.rows]


def test_a_step_whose_time_hardly_depends_on_its_rows_keeps_them() -> None:
    """Weights are read once for all rows: fewer of them would only cost throughput."""
    scheduler = Scheduler(
        SchedulerSettings(
            num_blocks=10_000,
            block_size=16,
            max_running=64,
            token_budget=4096,
            target=StepTarget(0.2, StepRates(1.0, 0.001, 0.001, 1e-9, 1e-9)),
        )
    )
    for number in range(61):
        scheduler.submit(a_request(number, "b" if number == 60 else "a"))
    settle(scheduler)
    assert sum(tenants(scheduler, step(scheduler)).values()) >= 0.9 * 61


def test_a_short_prompt_does_not_wait_for_the_end_of_another_tenants_long_one() -> None:
    scheduler = a_scheduler()
    scheduler.submit(a_request(0, "a"))
    settle(scheduler)
    scheduler.submit(a_request(1, "a", num_prompt=4000))
    step(scheduler)
    step(scheduler)
    scheduler.submit(a_request(2, "b", num_prompt=30))
    first_tokens = []
    for _ in range(4):
        plan = step(scheduler)
        assert plan.num_tokens * RATES.prompt_token_s < 0.21
        first_tokens += scheduler.rows.request_ids[plan.rows[plan.samples & (plan.counts > 1)]].tolist()
    assert first_tokens == [2]


def test_what_is_left_over_for_a_tenant_that_cannot_be_admitted_is_used() -> None:
    scheduler = a_scheduler(token_budget=64, num_blocks=280)
    scheduler.submit(a_request(0, "a", num_prompt=4000))
    step(scheduler)
    scheduler.submit(a_request(1, "b", num_prompt=64))
    assert step(scheduler).counts.tolist() == [64]
    assert len(scheduler.waiting) == 1


@settings(max_examples=examples(12), deadline=None)
@given(st.integers(0, 2**32))
def test_every_row_advances_within_a_bounded_number_of_steps(seed: int) -> None:
    """With requests that come and go, of several tenants, classes and weights."""
    rng = random.Random(seed)
    scheduler = a_scheduler(step_s=rng.choice([0.02, 0.05, 0.2]), token_budget=64)
    weights = {name: rng.choice([0.25, 1.0, 8.0]) for name in "abc"}
    last_seen: dict[int, int] = {}
    for number in range(150):
        for _ in range(rng.choice([0, 0, 1, 6]) if number < 120 else 0):
            tenant = rng.choice("aaaabc")
            request = a_request(1000 * number + len(last_seen), tenant, rng.randrange(1, 30), weight=weights[tenant])
            request.priority = rng.choice([INTERACTIVE, STANDARD, STANDARD, BATCH])
            request.max_tokens = rng.randrange(1, 120)
            if request.id not in last_seen:
                scheduler.submit(request)
                last_seen[request.id] = -1
        running = set(scheduler.rows.request_ids[scheduler.rows.order].tolist())
        if rng.random() < 0.1 and running:
            scheduler.abort(rng.choice(sorted(running)))
        plan = scheduler.plan(float(number))
        scheduler.take_ended()
        if plan is None:
            continue
        decoding = plan.rows[plan.samples]
        for request_id in scheduler.rows.request_ids[decoding].tolist():
            last_seen[request_id] = number
        scheduler.apply(plan.step_no, np.full(int(plan.samples.sum()), 7, np.int32))
        rows = scheduler.rows
        for row in rows.order.tolist():
            seen = last_seen[int(rows.request_ids[row])]
            assert seen == -1 or number - seen <= 2 * MAX_TURNS
        assert int(rows.skipped.max()) <= 2 * MAX_TURNS
