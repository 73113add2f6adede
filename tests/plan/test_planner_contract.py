"""What every planner must hold, driven through the engine's cycle with a runner that computes nothing.

A further planner is one more entry in `CASES`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from helpers.fake_clock import FakeClock
from helpers.fake_runner import FakeRunner, FakeStep

from millrace.engine.cycle import Confirmed, Cycle
from millrace.params.rows import RowParams
from millrace.params.sampling import SamplingParams
from millrace.plan.codec.encoder import encode_plan
from millrace.plan.encoding.planner import EncodePlanner, EncodeSettings
from millrace.plan.planner.protocol import Planner
from millrace.plan.request import Request
from millrace.plan.scheduler import Scheduler, SchedulerSettings
from millrace.plan.step import Ended, Int32s, StepInputs, StepPlan
from millrace.run.facts import RunnerFacts
from millrace.run.protocol import StepResult

MAX_ROWS = 4


@dataclass(frozen=True, slots=True)
class Case:
    """A planner with `MAX_ROWS` rows and the requests that it plans."""

    make: Callable[[], Planner]
    request: Callable[[int, int], Request]
    """By id and number of prompt tokens, of which every planner takes 40 and none 4,000."""


def new_scheduler() -> Planner:
    settings = SchedulerSettings(num_blocks=120, block_size=4, max_running=MAX_ROWS, token_budget=32)
    return Scheduler(settings)


def new_encode_planner() -> Planner:
    return EncodePlanner(EncodeSettings(max_rows=MAX_ROWS, token_budget=32, max_tokens=512))


def prompt_of(num_tokens: int, first: int) -> np.ndarray:
    return np.arange(first, first + num_tokens, dtype=np.int32) % 250


def generated(request_id: int, num_prompt: int) -> Request:
    return Request(request_id, prompt_of(num_prompt, request_id), max_tokens=1 + request_id % 9)


def pooled(request_id: int, num_prompt: int) -> Request:
    params = RowParams(SamplingParams(max_tokens=0, pooling="mean"))
    prompt = prompt_of(num_prompt, request_id)
    return Request(request_id, prompt, max_tokens=0, read_cache=False, row_params=params)


def scored(request_id: int, num_prompt: int) -> Request:
    """Some also draw."""
    params, max_tokens = RowParams(SamplingParams(prompt_logprobs=0)), request_id % 3
    prompt = prompt_of(num_prompt, request_id)
    return Request(request_id, prompt, max_tokens, read_cache=False, row_params=params)


CASES = {
    "scheduler": Case(new_scheduler, generated),
    "scheduler, pooled": Case(new_scheduler, pooled),
    "scheduler, scored": Case(new_scheduler, scored),
    "encoder": Case(new_encode_planner, pooled),
}


class ContractRunner(FakeRunner):
    """Follows admissions and releases as a runner's table does, and fails steps with a row of `poison`."""

    def __init__(self) -> None:
        super().__init__()
        self.table: dict[int, int] = {}
        self.in_flight: dict[int, set[int]] = {}
        """Rows of each step in flight, by its number."""
        self.poison: int | None = None
        self.last_step_no: int | None = None

    def forward(self, plan: StepPlan, given: tuple[Int32s, ...] | None = None) -> None:
        super().forward(plan)
        assert self.last_step_no is None or plan.step_no == self.last_step_no + 1
        self.last_step_no = plan.step_no
        busy = set().union(*self.in_flight.values())
        for release in plan.released:
            assert self.table.pop(release.row, release.request_id) == release.request_id
        for admission in plan.admitted:
            assert admission.row not in busy, "a step in flight still writes this row"
            self.table[admission.row] = admission.request_id
        rows = plan.rows.tolist()
        assert len(set(rows)) == len(rows)
        assert set(rows) <= set(self.table)
        self.in_flight[plan.step_no] = set(rows)

    def draw(self, plan: StepPlan, inputs: StepInputs | None = None) -> Any:
        pending = super().draw(plan, inputs)
        before = encode_plan(plan)
        fails = self.poison in [self.table[row] for row in plan.rows.tolist()]

        def wait() -> StepResult:
            assert encode_plan(plan) == before, "a plan was modified"
            if fails:
                raise RuntimeError("poison")
            del self.in_flight[plan.step_no]
            return pending.wait()

        return FakeStep(wait)


class Driven:
    """A planner in a cycle. Also its listener."""

    def __init__(self, case: Case, steps_in_flight: int = 2) -> None:
        self.planner, self.runner, self.clock = case.make(), ContractRunner(), FakeClock()
        facts = RunnerFacts(steps_in_flight)
        self.cycle = Cycle(self.planner, self.runner, self, facts=facts, clock=self.clock, probe=lambda: None)
        self.tokens: dict[int, int] = {}
        self.ended: dict[int, Ended] = {}

    def on_launched(self, plan: StepPlan, now: float) -> None:
        rows = self.planner.rows
        for row in plan.rows.tolist():
            assert rows.active[row]
            assert rows.request_ids[row] == self.runner.table[row]

    def on_tokens(self, done: Confirmed) -> None:
        for request_id in done.outcome.request_ids.tolist():
            assert request_id not in self.ended
            self.tokens[request_id] = self.tokens.get(request_id, 0) + 1
        self.on_ended(done.outcome.ended, done.at)

    def on_step_done(self, done: Confirmed) -> None:
        self.planner.check_sums()

    def on_ended(self, ended: tuple[Ended, ...], now: float) -> None:
        for event in ended:
            assert event.request_id not in self.ended
            self.ended[event.request_id] = event

    def advance(self) -> None:
        self.clock.now += 0.01
        try:
            self.cycle.advance()
        except RuntimeError as error:
            self.runner.in_flight.clear()
            culprit = self.cycle.recover(error)
            self.runner.in_flight.clear()
            if culprit is not None:
                assert self.planner.abort(culprit.request_id, "error", "poison")

    def finish(self) -> None:
        for _ in range(5_000):
            if not self.planner.has_work and not self.cycle.num_launched:
                break
            self.advance()
        figures = self.planner.figures(self.clock.now)
        assert (figures.running, figures.waiting, figures.rows_free) == (0, 0, MAX_ROWS)
        assert not any(figures.waiting_by_class)
        assert not self.planner.rows.active.any()
        assert self.planner.num_in_flight == 0
        assert self.planner.plan(self.clock.now) is None
        assert self.planner.take_ended() == ()


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
def test_every_request_ends_once_and_leaves_nothing_behind(case: Case, steps_in_flight: int) -> None:
    driven, rng = Driven(case, steps_in_flight), random.Random(steps_in_flight)
    aborted = set()
    for request_id in range(30):
        driven.planner.submit(case.request(request_id, rng.randrange(1, 40)))
        if rng.random() < 0.3:
            alive = [one for one in range(request_id + 1) if one not in driven.ended and one not in aborted]
            if alive:
                victim = rng.choice(alive)
                assert driven.planner.abort(victim, "cancelled", "why")
                assert not driven.planner.abort(victim)
                aborted.add(victim)
        figures = driven.planner.figures(driven.clock.now)
        assert figures.running <= MAX_ROWS
        assert figures.waiting == sum(figures.waiting_by_class)
        driven.advance()
    driven.finish()
    assert set(driven.ended) == set(range(30))
    assert aborted
    for request_id, event in driven.ended.items():
        if request_id in aborted:
            assert (event.reason, event.message) == ("cancelled", "why")
        else:
            assert event.reason in ("length", "stop")
            assert event.num_output == driven.tokens.get(request_id, 0) == case.request(request_id, 1).max_tokens


def test_a_request_that_can_never_run_ends_with_an_error(case: Case) -> None:
    driven = Driven(case)
    driven.planner.submit(case.request(1, 4_000))
    assert driven.planner.has_work, "its end must be told"
    driven.finish()
    assert driven.ended[1].reason == "error"
    assert driven.ended[1].message


def test_ids_that_no_request_has_are_not_aborted(case: Case) -> None:
    planner = case.make()
    assert not planner.abort(7)
    assert not planner.has_work
    assert planner.take_ended() == ()


@pytest.mark.parametrize("num_ahead", [0, MAX_ROWS])
def test_a_deadline_ends_requests_that_wait_or_run(case: Case, num_ahead: int) -> None:
    driven = Driven(case)
    for request_id in range(num_ahead):
        driven.planner.submit(case.request(request_id + 1, 40))
    late = case.request(0, 40)
    late.deadline = 0.015
    driven.planner.submit(late)
    driven.finish()
    assert driven.ended.pop(0).reason == "deadline"
    assert len(driven.ended) == num_ahead
    assert not {event.reason for event in driven.ended.values()} & {"deadline"}


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
@pytest.mark.parametrize("poison", [0, 3, 5])
def test_a_step_that_fails_ends_only_the_request_that_caused_it(case: Case, poison: int, steps_in_flight: int) -> None:
    driven = Driven(case, steps_in_flight)
    driven.runner.poison = poison
    for request_id in range(8):
        driven.planner.submit(case.request(request_id, 20))
    driven.finish()
    assert {one for one, event in driven.ended.items() if event.reason == "error"} == {poison}
    assert set(driven.ended) == set(range(8))


def test_a_step_of_chosen_rows_admits_nothing(case: Case) -> None:
    planner = case.make()
    for request_id in range(MAX_ROWS):
        planner.submit(case.request(request_id, 4))
    first = planner.plan(0.0)
    assert first is not None
    assert len(first.admitted) == MAX_ROWS
    planner.submit(case.request(MAX_ROWS, 4))
    suspects = planner.discard_in_flight()
    assert sorted(suspects) == sorted(first.rows.tolist())
    assert planner.num_in_flight == 0
    again = planner.plan(1.0, only=suspects[:1])
    assert again is not None
    assert again.rows.tolist() == [suspects[0]]
    planner.confirm(again.step_no, np.full(int(again.samples.sum()), 7, np.int32))
    rest = planner.plan(2.0)
    assert rest is not None
    told = [admission.request_id for plan in (again, rest) for admission in plan.admitted]
    assert told[0] == first.admitted[first.rows.tolist().index(suspects[0])].request_id
    assert len(again.admitted) == 1
    assert set(range(MAX_ROWS)) <= set(told), "every running request is announced again"


def test_captures_end(case: Case) -> None:
    captures = case.make().captures
    for _ in range(captures.num_left):
        assert captures.next() is not None
    assert captures.next() is None
