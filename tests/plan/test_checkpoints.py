"""Checkpoints of recurrent states: where they are made, who begins with them, and that every slot is accounted for."""

import random

import numpy as np
import pytest
from helpers.suite import examples
from helpers.toy_device import ToyDevice
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.plan.kv.states.state_slots import StateSlots
from millrace.plan.request import Request
from millrace.plan.scheduler import Scheduler, SchedulerSettings
from millrace.plan.step import StepPlan

SIZE, VOCAB = 4, 50


class Engine:
    """A scheduler and a toy device that fails if a row begins without the state of its prefix."""

    def __init__(self, state_slots: int, token_budget: int = 64, **limits: float) -> None:
        sizes = {"num_blocks": 200, "block_size": SIZE, "max_running": 4, **limits}
        self.scheduler = Scheduler(SchedulerSettings(**sizes, token_budget=token_budget, state_slots=state_slots))
        self.device = ToyDevice(sizes["num_blocks"], SIZE, 4, VOCAB, has_states=True)
        self.plans: list[StepPlan] = []
        self.num_requests = 0

    def submit(self, prompt: list[int], max_tokens: int = 2) -> Request:
        request = Request(id=self.num_requests, prompt=np.array(prompt, np.int32), max_tokens=max_tokens)
        self.num_requests += 1
        self.scheduler.submit(request)
        return request

    def run(self) -> None:
        while self.scheduler.has_work:
            plan = self.scheduler.plan(0.0)
            assert plan is not None
            self.plans.append(plan)
            self.scheduler.apply(plan.step_no, *self.device.run(plan))
            self.scheduler.check_sums()

    def saved(self) -> list[int]:
        """Numbers of tokens after which states were kept since the last call."""
        copies = [plan.states for plan in self.plans if plan.states is not None]
        self.plans.clear()
        return [position for one in copies for position in one.positions[one.num_loads :].tolist()]


def tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=count)


def test_an_equal_prompt_begins_at_the_last_block_boundary() -> None:
    engine = Engine(8)
    engine.submit(tokens(22, 0))
    engine.run()
    assert engine.saved() == [20]
    again = engine.submit(tokens(22, 0))
    engine.run()
    assert again.cached_tokens == 20
    assert engine.saved() == []


def test_the_second_prompt_that_branches_off_leaves_a_state_for_the_third() -> None:
    engine, shared = Engine(8), tokens(17, 1)
    branches = [engine.submit(shared + tokens(10, seed)) for seed in (2, 3, 4)]
    for _ in branches:
        engine.run()
    first, second, third = branches
    assert (first.cached_tokens, second.cached_tokens, third.cached_tokens) == (0, 0, 16)
    assert sorted(engine.saved()) == [16, 24, 24, 24]


def test_ends_of_chunks_take_each_others_slots_and_the_end_of_a_prompt_takes_theirs() -> None:
    engine = Engine(3, token_budget=8)
    engine.submit(tokens(40, 5), max_tokens=1)
    engine.run()
    assert engine.saved() == [8, 16, 24, 32, 36]
    assert engine.scheduler.prefix.checkpoints.slots.num_evicted == 2
    other = engine.submit(tokens(16, 5) + tokens(9, 6))
    engine.run()
    assert other.cached_tokens == 16


def test_a_request_waits_for_a_state_that_another_is_about_to_make() -> None:
    engine = Engine(8)
    engine.submit(tokens(33, 6))
    twin = engine.submit(tokens(33, 6))
    engine.run()
    assert twin.cached_tokens == 32


def test_without_slots_every_prompt_is_computed_in_one_piece() -> None:
    engine = Engine(0)
    engine.submit(tokens(22, 0), max_tokens=1)
    again = engine.submit(tokens(22, 0), max_tokens=1)
    engine.run()
    assert again.cached_tokens == 0
    assert all(plan.states is None for plan in engine.plans)
    assert {22} == {int(count) for plan in engine.plans for count in plan.counts}


def test_a_preempted_row_resumes_from_its_checkpoint() -> None:
    engine = Engine(8, num_blocks=20, max_running=2, expected_output=1.0)
    requests = [engine.submit(tokens(21, seed), max_tokens=30) for seed in (7, 8)]
    engine.run()
    assert sum(request.preemptions for request in requests) > 0
    assert any(plan.states is not None and plan.states.num_loads for plan in engine.plans)


def test_after_a_failed_step_rows_begin_at_a_checkpoint_or_at_zero() -> None:
    engine = Engine(8)
    engine.submit(tokens(22, 9), max_tokens=6)
    for _ in range(3):
        plan = engine.scheduler.plan(0.0)
        engine.scheduler.apply(plan.step_no, *engine.device.run(plan))
    engine.scheduler.plan(0.0)
    engine.scheduler.discard_in_flight()
    plan = engine.scheduler.plan(0.0)
    assert plan.starts.tolist() == [20]
    assert plan.states.num_loads == 1
    engine.scheduler.apply(plan.step_no, *engine.device.run(plan))
    engine.run()


@settings(max_examples=examples(20), deadline=None)
@given(st.integers(0, 2**32))
def test_the_slot_equation_holds(seed: int) -> None:
    rng = random.Random(seed)
    slots = StateSlots(rng.choice([1, 2, 5]))
    filling: set[bytes] = set()
    leaving: list[bytes] = []
    for _ in range(60):
        name = bytes([rng.randrange(8)])
        action = rng.choice(["fill", "filled", "hold", "let_go", "discard"])
        if action == "fill":
            had = slots.has(name) or name in filling
            slot = slots.fill(name, 0, rng.random() < 0.5)
            assert not (had and slot is not None)
            filling |= {name} if slot is not None else set()
        elif action == "filled" and filling:
            slots.filled(filling.pop())
        elif action == "hold" and slots.has(name):
            slots.hold(name)
            leaving.append(name)
        elif action == "let_go" and leaving:
            slots.let_go(leaving.pop())
        elif action == "discard" and rng.random() < 0.2:
            slots.discard_filling()
            filling.clear()
        assert all(slots.has(held) for held in leaving)
        slots.check()


def test_a_broken_slot_equation_is_noticed() -> None:
    slots = StateSlots(2)
    slots.fill(b"a", 0)
    slots._free.append(1)  # Filled and free at the same time.
    with pytest.raises(AssertionError, match="state slot equation broken"):
        slots.check()
