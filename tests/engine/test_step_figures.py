from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from millrace.engine.cycle import Confirmed
from millrace.engine.figures.step_figures import ModelWork, StepFigures
from millrace.observe.histograms import ITL, SPECS, Histograms
from millrace.plan.request import Request
from millrace.plan.scheduler import Scheduler, SchedulerSettings
from millrace.plan.step import StepPlan
from millrace.run.protocol import StepResult

END = 6
NO_RESULT = StepResult(0, torch.zeros(0), None, np.zeros(0, np.int64), np.zeros(0, np.int32), ())


class Driven:
    """A scheduler whose steps are counted; each step has its own time."""

    def __init__(self, num_blocks: int = 128, expected_output: float = 512.0) -> None:
        self.scheduler = Scheduler(
            SchedulerSettings(
                num_blocks=num_blocks,
                block_size=4,
                max_running=8,
                token_budget=32,
                expected_output=expected_output,
            )
        )
        self.histograms, self.of_adapter = Histograms(), Histograms()
        """`of_adapter`: of requests whose number is a multiple of 3."""
        work = ModelWork(1000.0, 10.0, 2.0, 1.0)
        self.figures = StepFigures(self.scheduler.rows, self.histograms, work, {"third": self.of_adapter})

    def submit(self, number: int, *, prompt: int = 4, max_tokens: int = 50, priority: int = 1) -> None:
        tokens = np.arange(prompt, dtype=np.int32) + 100 * number
        request = Request(
            id=number, prompt=tokens, max_tokens=max_tokens, priority=priority, end_token_ids=(END,) * (number % 2)
        )
        self.scheduler.submit(request)

    def step(self, now: float) -> int:
        plan = self.scheduler.plan(now)
        assert plan is not None
        self.launch(plan, {})
        return len(self.confirm(plan, now)[1])

    def launch(self, plan: StepPlan, preempted: dict[int, float]) -> None:
        """As the engine does. `preempted`: when those requests got their last tokens."""
        for release in plan.released:
            if release.reason == "preempted":
                preempted[release.request_id] = self.figures.last_token_at(release.row)
        for admission in plan.admitted:
            number = admission.request_id
            adapter = "" if number % 3 else "third"
            self.figures.on_admitted(admission.row, preempted.pop(number, math.nan), adapter)

    def confirm(self, plan: StepPlan, now: float, num_kinds: int = 1) -> tuple[StepPlan, list[int], float]:
        """Returns the plan, the requests that got a token, and the time. `num_kinds`: one in so many tokens is an end
        token; none if 1."""
        tokens = (np.arange(int(plan.samples.sum())) + plan.step_no) % num_kinds
        outcome = self.scheduler.apply(plan.step_no, tokens.astype(np.int32))
        self.figures.on_step(Confirmed(plan, NO_RESULT, outcome, now - 0.5, now, 0.25))
        return plan, outcome.request_ids.tolist(), now

    def gaps(self) -> tuple[list[float], list[float]]:
        """Number and sum of the gaps by class."""
        self.figures.count()
        itl = self.histograms.values[ITL]
        return itl[:, :-1].sum(axis=1).tolist(), itl[:, -1].tolist()


def test_every_gap_between_tokens_counts_once() -> None:
    driven = Driven()
    driven.submit(1, max_tokens=6, priority=0)
    driven.submit(2)
    for now in (1.0, 1.25, 1.5):
        assert driven.step(now) == 2
    counts, sums = driven.gaps()
    assert (counts, sums) == ([2, 2, 0], [pytest.approx(0.5), pytest.approx(0.5), 0])
    driven.submit(3, priority=2)
    assert driven.step(2.0) == 3
    assert driven.step(2.25) == 3
    assert driven.step(2.5) == 3  # The last token of request 1.
    assert driven.step(4.0) == 2
    counts, sums = driven.gaps()
    assert counts == [5, 6, 3]
    assert sums == [pytest.approx(1.5), pytest.approx(3.0), pytest.approx(2.0)]
    assert driven.figures.output_tokens == 6 + 7 + 4


def test_a_reused_row_begins_without_a_gap() -> None:
    driven = Driven()
    driven.submit(1, max_tokens=2)
    driven.step(1.0)
    driven.step(1.5)
    driven.submit(2, max_tokens=2)
    driven.step(9.0)
    driven.step(9.25)
    assert driven.gaps()[1] == [0, pytest.approx(0.75), 0]


def test_a_row_given_away_before_a_count_begins_without_a_gap() -> None:
    driven = Driven()
    driven.submit(1, max_tokens=2)
    driven.submit(2)
    driven.step(1.0)
    driven.step(1.5)
    driven.submit(3)
    plan = driven.scheduler.plan(2.0)
    assert plan is not None
    driven.launch(plan, {})
    driven.figures.count()
    driven.scheduler.abort(2)
    assert driven.confirm(plan, 9.0)[1] == [3]
    assert driven.gaps() == ([0, 2, 0], [0, pytest.approx(1.0), 0])


def test_composition_and_work_of_steps() -> None:
    driven = Driven()
    driven.submit(1, prompt=6)
    driven.submit(2, prompt=3)
    driven.step(1.0)
    figures = driven.figures
    figures.count()
    assert (figures.prefill_tokens, figures.decode_tokens, figures.step_rows) == (9, 0, 2)
    pairs = 6 * 7 // 2 + 3 * 4 // 2
    assert figures.flops == 9 * 10 + pairs
    assert figures.bytes_read == 1000 + 2 * 9
    for now in (2.0, 3.0):
        driven.step(now)
    figures.count()
    assert figures.decode_tokens == 4
    assert figures.bytes_read == 3000 + 2 * (9 + 11 + 13)
    assert figures.flops == 9 * 10 + pairs + 4 * 10 + 11 + 13


class CountedOneByOne:
    """The same figures, counted token by token as they come: what the columns must add up to."""

    def __init__(self) -> None:
        self.last: dict[int, float] = {}
        self.gaps: list[list[float]] = [[], [], []]
        self.of_adapter: list[float] = []
        self.prefill = self.decode = self.context = self.pairs = 0

    def on_step(self, plan: StepPlan, request_ids: list[int], now: float, classes: dict[int, int]) -> None:
        for start, count in zip(plan.starts.tolist(), plan.counts.tolist(), strict=True):
            self.prefill += count if count != 1 else 0
            self.decode += count == 1
            self.context += start + count
            self.pairs += sum(range(start + 1, start + count + 1))
        for request_id in request_ids:
            if request_id in self.last:
                self.gaps[classes[request_id]].append(now - self.last[request_id])
                if request_id % 3 == 0:
                    self.of_adapter.append(now - self.last[request_id])
            self.last[request_id] = now


@pytest.mark.parametrize("num_blocks", [18, 200])  # With few blocks, requests are preempted or left out.
@pytest.mark.parametrize("num_classes", [1, 3])
def test_many_steps_at_once_count_as_much_as_every_token_by_itself(num_classes: int, num_blocks: int) -> None:
    rng = np.random.default_rng(num_classes)
    driven, slow = Driven(num_blocks, expected_output=1.0), CountedOneByOne()
    classes: dict[int, int] = {}
    preempted: dict[int, float] = {}
    flying: list[tuple[StepPlan, float]] = []
    for number in range(700):
        now = float(number) + float(rng.random())
        if rng.random() < 0.3:
            classes[number] = min(2, number * num_classes // 300) if num_classes > 1 else 1
            driven.submit(
                number,
                prompt=int(rng.integers(1, 40 if rng.random() < 0.1 else 8)),
                max_tokens=int(rng.integers(1, 30)),
                priority=classes[number],
            )
        if classes and rng.random() < 0.1:
            driven.scheduler.abort(int(rng.choice(list(classes)[-8:])))
        plan = driven.scheduler.plan(now)
        if plan is not None:
            driven.launch(plan, preempted)
            flying.append((plan, now))
        if len(flying) > 1 or (flying and (plan is None or rng.random() < 0.3)):
            slow.on_step(*driven.confirm(*flying.pop(0), num_kinds=11), classes)
        if rng.random() < 0.2:
            driven.figures.count()
    assert (driven.scheduler.num_preemptions > 10) == (num_blocks < 100)
    counts, sums = driven.gaps()
    assert counts == [len(own) for own in slow.gaps]
    assert sums == [pytest.approx(sum(own)) for own in slow.gaps]
    own = driven.of_adapter.values[ITL]
    assert slow.of_adapter
    assert own[:, :-1].sum() == len(slow.of_adapter)
    assert own[:, -1].sum() == pytest.approx(sum(slow.of_adapter))
    places = np.concatenate([np.searchsorted(SPECS[ITL].edges, own) for own in slow.gaps if own])
    buckets = driven.histograms.values[ITL, :, :-1].sum(axis=0)
    assert buckets.tolist() == np.bincount(places, minlength=len(buckets)).tolist()
    figures = driven.figures
    assert (figures.prefill_tokens, figures.decode_tokens) == (slow.prefill, slow.decode)
    num_steps = figures.last_steps(10_000)["num_steps"]
    assert figures.bytes_read == 1000 * num_steps + 2 * slow.context
    assert figures.flops == 10 * (slow.prefill + slow.decode) + slow.pairs


def test_the_log_keeps_every_step() -> None:
    driven = Driven()
    driven.submit(1, prompt=6, max_tokens=400)
    for number in range(300):
        driven.step(float(number))
    log = driven.figures.last_steps(200)
    assert log["num_steps"] == 300
    assert log["done"] == [float(number) for number in range(100, 300)]
    assert log["launched"] == [float(number) - 0.5 for number in range(100, 300)]
    assert (log["decode_tokens"], log["prefill_tokens"]) == ([1] * 200, [0] * 200)
    first = driven.figures.last_steps(300)
    assert (first["prefill_tokens"][0], first["bytes"][0], first["flops"][0]) == (6, 1012, 60 + 21)
