"""The order of the waiting queue: classes with aging, fair shares of tenants, and the four policies."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.suite import examples
from helpers.toy_device import ToyDevice
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.plan.queue.policy import MAX_HEAD_START_S
from millrace.plan.queue.predict import OutputLengthPredictor
from millrace.plan.request import Request
from millrace.plan.scheduler import Scheduler, SchedulerSettings

POLICIES = ("fcfs", "shortest", "feedback", "deadline", "prefix")


def make(policy: str = "fcfs", **limits: float) -> Scheduler:
    wanted = {"num_blocks": 400, "block_size": 4, "max_running": 1, "token_budget": 64, "aging_s": 30.0, **limits}
    return Scheduler(SchedulerSettings(**wanted, policy=policy))


def make_request(request_id: int, *, prompt: int = 4, max_tokens: int = 8, **fields: object) -> Request:
    tokens = np.full(prompt, request_id % 1000, np.int32)
    return Request(id=request_id, prompt=tokens, max_tokens=max_tokens, **fields)


def order(scheduler: Scheduler, now: float = 0.0) -> list[int]:
    return [request.id for request in scheduler.waiting.in_order(now)]


class Run:
    """Runs steps of `step_s` seconds and records when requests get their first token and end."""

    def __init__(self, scheduler: Scheduler, step_s: float = 1.0) -> None:
        self.scheduler, self.step_s, self.now = scheduler, step_s, 0.0
        self.device = ToyDevice(scheduler.pool.total, scheduler.block_size, scheduler.rows.capacity, 1000)
        self.began: dict[int, float] = {}
        self.ended: dict[int, float] = {}

    def step(self) -> None:
        plan = self.scheduler.plan(self.now)
        self.now += self.step_s
        if plan is None:
            return
        outcome = self.scheduler.apply(plan.step_no, *self.device.run(plan))
        self.began.update(dict.fromkeys(outcome.first_ids.tolist(), self.now))
        self.ended.update({event.request_id: self.now for event in outcome.ended})

    def to_end(self, limit: int = 20_000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work:
                return
            self.step()
        pytest.fail("starved")


@pytest.mark.parametrize("policy", POLICIES)
def test_the_urgent_class_goes_first_and_aging_promotes(policy: str) -> None:
    scheduler = make(policy)
    scheduler.submit(make_request(0, priority=2, arrival=0.0))
    scheduler.submit(make_request(1, priority=1, arrival=0.0))
    scheduler.submit(make_request(2, priority=0, arrival=5.0))
    assert order(scheduler, 6.0) == [2, 1, 0]
    scheduler.submit(make_request(3, priority=0, arrival=150.0))
    # After two minutes of aging all three are in one class, so the latest arrival goes last.
    assert order(scheduler, 151.0)[-1] == 3


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rival", [0, 1])
def test_no_request_starves_behind_an_endless_stream_of_preferred_ones(policy: str, rival: int) -> None:
    scheduler = make(policy, aging_s=20.0)
    run = Run(scheduler)
    scheduler.submit(make_request(0, priority=2, max_tokens=40, arrival=0.0))
    for number in range(1, 400):
        scheduler.submit(make_request(number, priority=rival, max_tokens=2, arrival=run.now))
        run.step()
        run.step()
        if 0 in run.ended:
            break
    assert 0 in run.ended, "the batch request never ran"


def test_arrival_order_within_a_class_is_kept_exactly() -> None:
    scheduler = make()
    for number in range(200):
        scheduler.submit(make_request(number, arrival=number / 7))
    run = Run(scheduler)
    run.to_end()
    assert sorted(run.began, key=run.began.__getitem__) == list(range(200))


def test_tenants_share_by_weight_independent_of_their_load() -> None:
    """Three tenants with a backlog. The first sends ten times as many requests and gets no more than its share."""
    scheduler = make(max_running=4)
    weights = {"greedy": 1.0, "plain": 1.0, "double": 2.0}
    tenant_of: dict[int, str] = {}
    for tenant, count in (("greedy", 2000), ("plain", 200), ("double", 200)):
        for _ in range(count):
            number = len(tenant_of)
            tenant_of[number] = tenant
            scheduler.submit(make_request(number, tenant=tenant, weight=weights[tenant], max_tokens=6))
    run = Run(scheduler)
    while sum(tenant_of[i] == "double" for i in run.ended) < 150:
        run.step()
    done = {tenant: sum(tenant_of[i] == tenant for i in run.ended) for tenant in weights}
    assert 65 <= done["plain"] <= 85
    assert 65 <= done["greedy"] <= 85


def test_an_idle_tenant_earns_no_credit() -> None:
    scheduler = make()
    run = Run(scheduler)
    for number in range(100):
        scheduler.submit(make_request(number, tenant="busy", max_tokens=4))
    for _ in range(200):
        run.step()
    for number in range(100, 140):
        scheduler.submit(make_request(number, tenant="late", max_tokens=4, arrival=run.now))
    before = set(run.ended)
    for _ in range(80):
        run.step()
    new = [number for number in run.ended if number not in before]
    late = sum(number >= 100 for number in new)
    assert 0.4 <= late / len(new) <= 0.6


def test_shortest_first_learns_lengths_and_prefers_short_requests() -> None:
    predictor = OutputLengthPredictor()
    for _ in range(20):
        for tenant, length in (("terse", 5), ("verbose", 400)):
            ended = make_request(0, tenant=tenant, max_tokens=1000)
            ended.num_output = length
            predictor.observe(ended)
    assert predictor.predict(make_request(1, tenant="terse", max_tokens=1000)) < 60
    assert predictor.predict(make_request(1, tenant="verbose", max_tokens=1000)) > 300
    assert predictor.predict(make_request(1, tenant="verbose", max_tokens=10)) == 10
    scheduler = make("shortest")
    scheduler.submit(make_request(0, max_tokens=400, arrival=0.0))
    scheduler.submit(make_request(1, max_tokens=2, arrival=3.0))
    scheduler.submit(make_request(2, max_tokens=2, arrival=100.0))
    assert order(scheduler, 0.0) == [1, 0, 2]


def test_the_predictor_is_bounded() -> None:
    predictor = OutputLengthPredictor()
    for number in range(10_000):
        predictor.observe(make_request(0, tenant=f"t{number}"))
    # What it remembers of a tenant shows in no answer.
    assert len(predictor._means) <= 4096


def test_the_earliest_deadline_goes_first() -> None:
    scheduler = make("deadline")
    scheduler.submit(make_request(0, arrival=0.0))
    scheduler.submit(make_request(1, arrival=1.0, deadline=4.0))
    scheduler.submit(make_request(2, arrival=2.0, deadline=3.0))
    assert order(scheduler) == [2, 1, 0]


def test_feedback_prefers_new_requests_to_long_running_ones() -> None:
    scheduler = make("feedback", max_running=1)
    run = Run(scheduler)
    scheduler.submit(make_request(0, max_tokens=200))
    scheduler.submit(make_request(1, max_tokens=200))
    for _ in range(40):
        run.step()
    assert 1 in run.began, "the second request starts long before the first ends"
    assert 0 not in run.ended
    run.to_end()
    assert set(run.ended) == {0, 1}


def test_a_batch_row_is_preempted_for_an_interactive_request() -> None:
    scheduler = make(max_running=2)
    run = Run(scheduler)
    for number in range(2):
        scheduler.submit(make_request(number, priority=2, max_tokens=100))
    for _ in range(10):
        run.step()
    scheduler.submit(make_request(2, priority=0, max_tokens=4, arrival=run.now))
    submitted_at = run.now
    run.to_end()
    assert run.began[2] - submitted_at <= 4
    assert run.ended.keys() == {0, 1, 2}
    assert scheduler.num_preemptions == 1


def test_diagnostics_say_why_a_request_waited_and_where_its_prompt_diverged() -> None:
    scheduler = make(max_running=1)
    run = Run(scheduler)
    first = Request(id=0, prompt=np.arange(16, dtype=np.int32), max_tokens=4)
    scheduler.submit(first)
    run.step()
    prompt = np.arange(16, dtype=np.int32)
    prompt[10] = 77
    second = Request(id=1, prompt=prompt, max_tokens=4, arrival=1.0)
    scheduler.submit(second)
    run.to_end()
    assert second.cached_tokens == 8
    assert second.diagnostics.diverged is not None
    assert second.diagnostics.diverged.at == 10
    assert list(second.diagnostics.waited_for) == ["rows"]
    assert 2.0 <= second.diagnostics.waited_for["rows"] <= 4.0


def test_the_longest_cached_prefix_goes_first_with_a_bounded_head_start() -> None:
    run = Run(make("prefix"))
    texts = {name: np.arange(length, dtype=np.int32) + 450 * (name - 1) for name, length in ((1, 400), (2, 40))}
    for name, text in texts.items():
        run.scheduler.submit(Request(id=name, prompt=text, max_tokens=1, arrival=run.now))
        run.to_end()
    run.scheduler.submit(make_request(3, max_tokens=50, arrival=100.0))
    run.step()  # Takes the only row.
    arrivals = {4: (100.0, make_request(0).prompt), 5: (101.0, texts[2]), 6: (101.5, texts[1])}
    arrivals[7] = (101.5 + MAX_HEAD_START_S, texts[1])
    for request_id, (arrival, prompt) in arrivals.items():
        run.scheduler.submit(Request(id=request_id, prompt=prompt, max_tokens=1, arrival=arrival))
    assert order(run.scheduler) == [6, 4, 5, 7]
    run.to_end()
    assert [request_id for request_id in run.began if request_id >= 4] == [6, 4, 5, 7]


@pytest.mark.parametrize(("at", "is_reordered"), [(10, True), (5, False)])
def test_the_divergence_is_from_the_most_similar_cached_prompt_and_not_the_last_one(
    at: int, is_reordered: bool
) -> None:
    """Of blocks of 16 tokens."""
    run = Run(make(max_running=1, block_size=16))
    similar = np.arange(40, dtype=np.int32)
    asked = similar.copy()
    asked[at:] = np.concatenate([[99, 98, 97], similar[at:]])[: 40 - at] if is_reordered else 90
    others = [np.concatenate([similar[:first], np.full(40 - first, 70 + first, np.int32)]) for first in (2, 0, 1)]
    for number, prompt in enumerate([similar, *others, asked]):
        request = Request(id=number, prompt=prompt.astype(np.int32), max_tokens=2, arrival=run.now)
        run.scheduler.submit(request)
        run.to_end()
    diverged = request.diagnostics.diverged
    assert diverged is not None
    assert (diverged.at, diverged.is_reordered) == (at, is_reordered)


@settings(max_examples=examples(20), deadline=None)
@given(st.sampled_from(POLICIES), st.integers(0, 2**32))
def test_the_queue_yields_every_request_once_even_if_some_are_removed_during_iteration(policy: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    scheduler = make(policy)
    for number in range(60):
        scheduler.submit(
            make_request(
                number, priority=int(rng.integers(3)), tenant=str(rng.integers(4)), arrival=float(rng.integers(100))
            )
        )
    seen = []
    for request in scheduler.waiting.in_order(50.0):
        seen.append(request.id)
        if rng.random() < 0.5:
            scheduler.abort(request.id)
    assert sorted(seen) == list(range(60))
