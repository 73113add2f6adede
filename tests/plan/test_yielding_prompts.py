"""Prompts yield to decoding rows of a more urgent class: these keep two thirds of their pace, and every prompt ends."""

from __future__ import annotations

import random
from dataclasses import astuple

import numpy as np
import pytest
from helpers.inside import part_of

from millrace.plan.budget import MANY_PREFILLS, StepTarget
from millrace.plan.pacing.step_time import StepRates
from millrace.plan.pacing.yielding import PERIODS
from millrace.plan.request import BATCH, INTERACTIVE, STANDARD, Request
from millrace.plan.scheduler import Scheduler, SchedulerSettings
from millrace.plan.step import StepPlan

RATES = StepRates(step_s=0.02, prompt_token_s=0.003, decode_row_s=0.004, context_token_s=2e-6, pair_s=2e-7)
"""A small machine: a stream alone has steps of 24 ms."""
TARGET_S = 0.2
STREAM, PROMPT = 0, 1
LONG = 3300
LONGEST = PERIODS[1]


class Device:
    """A scheduler whose steps take as long as the true rates say."""

    def __init__(self, first: StepRates = RATES, true: StepRates = RATES, noise: float = 0.0, aging_s: float = 30.0):
        self.scheduler = Scheduler(
            SchedulerSettings(
                num_blocks=10_000,
                block_size=16,
                max_running=64,
                token_budget=512,
                target=StepTarget(TARGET_S, first),
                prefix_cache=False,
                aging_s=aging_s,
            )
        )
        self.true, self.noise, self.rng = true, noise, random.Random(5)
        self.now = 0.0
        self.num_output: dict[int, int] = {}

    def submit(self, request_id: int, num_prompt: int, priority: int, tenant: str = "", arrival: float = -1.0) -> None:
        self.scheduler.submit(
            Request(
                id=request_id,
                prompt=np.full(num_prompt, 1 + request_id, np.int32),
                max_tokens=100_000 - num_prompt,
                priority=priority,
                tenant=tenant,
                arrival=self.now if arrival < 0 else arrival,
            )
        )

    def step(self) -> tuple[StepPlan, float]:
        """A step and its time."""
        plan = self.scheduler.plan(self.now)
        assert plan is not None
        seconds = time_of(plan, self.true) * max(0.5, self.rng.gauss(1.0, self.noise))
        self.now += seconds
        for request_id in self.scheduler.rows.request_ids[plan.rows[plan.samples]].tolist():
            self.num_output[request_id] = self.num_output.get(request_id, 0) + 1
        self.scheduler.apply(plan.step_no, np.full(int(plan.samples.sum()), 7, np.int32))
        self.scheduler.observe_step(plan, seconds)
        return plan, seconds

    def tokens_of(self, plan: StepPlan, request_id: int) -> int:
        return int(plan.counts[self.scheduler.rows.request_ids[plan.rows] == request_id].sum())

    def start(self, request_id: int, priority: int) -> float:
        """A stream that has run for some time. Returns the time of its last step."""
        self.submit(request_id, 32, priority)
        return [self.step()[1] for _ in range(40)][-1]


def time_of(plan: StepPlan, rates: StepRates) -> float:
    parts = [1.0, 0.0, 0.0, 0.0, 0.0]
    for start, count, draws in zip(plan.starts.tolist(), plan.counts.tolist(), plan.samples.tolist(), strict=True):
        if count == 1 and draws:
            parts[2] += 1
            parts[3] += start + 1
        else:
            parts[1] += count
            parts[4] += count * (start + count / 2)
    return sum(part * rate for part, rate in zip(parts, astuple(rates), strict=True))


def steps_until_first_token(device: Device, request_id: int, most: int = 5000) -> list[tuple[StepPlan, float]]:
    steps = []
    while device.num_output.get(request_id, 0) == 0:
        steps.append(device.step())
        assert len(steps) < most, "the prompt is never computed"
    return steps


@pytest.mark.parametrize(("stream", "prompt"), [(INTERACTIVE, BATCH), (INTERACTIVE, STANDARD), (STANDARD, BATCH)])
def test_a_stream_keeps_two_thirds_of_its_pace_beside_a_less_urgent_prompt(stream: int, prompt: int) -> None:
    device = Device()
    device.start(STREAM, stream)
    device.submit(PROMPT, LONG, prompt)
    steps = steps_until_first_token(device, PROMPT)
    alone_s = time_of_stream(device)
    assert all(device.tokens_of(plan, STREAM) == 1 for plan, _ in steps)
    times = [seconds for _, seconds in steps]
    assert 1.3 < np.mean(times) / alone_s < 1.52
    assert max(pace_of(times)) < 1.7 * alone_s


def pace_of(times: list[float]) -> list[float]:
    """Mean time of each few steps in a row."""
    return np.convolve(times, np.full(2 * LONGEST, 0.5 / LONGEST), "valid").tolist()


@pytest.mark.parametrize(
    ("stream", "prompt"),
    [(INTERACTIVE, INTERACTIVE), (STANDARD, STANDARD), (BATCH, BATCH), (STANDARD, INTERACTIVE), (BATCH, STANDARD)],
)
def test_a_prompt_that_is_as_urgent_uses_the_step_target(stream: int, prompt: int) -> None:
    device = Device()
    device.start(STREAM, stream)
    device.submit(PROMPT, LONG, prompt)
    times = [seconds for _, seconds in steps_until_first_token(device, PROMPT)]
    assert np.median(times) == pytest.approx(TARGET_S, rel=0.15)


@pytest.mark.parametrize("factor", [0.2, 5.0])
def test_the_pace_is_kept_with_noisy_times_and_wrong_first_rates(factor: float) -> None:
    """Over so many steps that the first rates are forgotten."""
    device = Device(first=StepRates(*(factor * rate for rate in astuple(RATES))), noise=0.15)
    device.start(STREAM, INTERACTIVE)
    device.submit(PROMPT, 3 * LONG, BATCH)
    times = [seconds for _, seconds in steps_until_first_token(device, PROMPT)]
    assert 1.1 < np.mean(times[20:]) / time_of_stream(device) < 1.6


def test_the_pace_is_kept_on_a_machine_that_other_work_slows_down_at_times() -> None:
    """For three seconds out of six, everything takes 2.5 times as long."""
    device = Device()
    device.start(STREAM, INTERACTIVE)
    device.submit(PROMPT, 2 * LONG, BATCH)
    ratios = []
    while device.num_output.get(PROMPT, 0) == 0:
        factor = 2.5 if device.now % 6 > 3 else 1.0
        device.true = StepRates(*(factor * rate for rate in astuple(RATES)))
        ratios.append(device.step()[1] / time_of_stream(device))
    assert 1.3 < np.mean(ratios) < 1.6


def time_of_stream(device: Device) -> float:
    """Predicted by the true rates, for a step with the stream alone."""
    rows = device.scheduler.rows
    context = int(rows.known[part_of(device.scheduler, "seating").row_of(STREAM) or 0])
    return device.true.step_s + device.true.decode_row_s + device.true.context_token_s * context


def test_many_less_urgent_prompts_do_not_make_steps_longer() -> None:
    device = Device()
    alone_s = device.start(STREAM, INTERACTIVE)
    for number in range(2 * MANY_PREFILLS):
        device.submit(PROMPT + number, 400, BATCH)
    assert max(pace_of([device.step()[1] for _ in range(100)])) < 1.7 * alone_s


def test_every_prompt_ends_however_slow_its_tokens_are() -> None:
    device = Device(true=StepRates(1e-3, 0.1, 1e-3, 1e-9, 1e-9))
    device.start(STREAM, INTERACTIVE)
    device.submit(PROMPT, 300, BATCH)
    steps = steps_until_first_token(device, PROMPT)
    assert sum(device.tokens_of(plan, PROMPT) for plan, _ in steps) == 300


def test_an_urgent_prompt_does_not_wait_for_less_urgent_ones_that_run_or_have_aged() -> None:
    device = Device(aging_s=1.0)
    device.start(STREAM, INTERACTIVE)
    device.submit(PROMPT, LONG, BATCH)
    device.step()
    for number in range(300):
        device.submit(100 + number, 400, BATCH, arrival=max(0.0, device.now - 10.0))
    device.step()
    device.submit(2, 200, INTERACTIVE)
    steps = steps_until_first_token(device, 2)
    assert len(steps) <= 6, "200 tokens are computed at the pace of the step target"
    assert device.num_output.get(PROMPT, 0) == 0


def test_tenants_share_what_less_urgent_prompts_may_use() -> None:
    device = Device(true=RATES, first=RATES)
    for number in range(8):
        device.submit(10 + number, 16, INTERACTIVE)
    for _ in range(40):
        device.step()
    device.submit(PROMPT, LONG, BATCH, tenant="a")
    device.step()
    device.submit(2, LONG, BATCH, tenant="b")
    plans = [device.step()[0] for _ in range(60)]
    first, second = (sum(device.tokens_of(plan, number) for plan in plans) for number in (PROMPT, 2))
    assert second > 0.6 * first > 0


def test_an_urgent_prompt_and_a_less_urgent_one_advance_in_the_same_steps() -> None:
    device = Device()
    alone_s = device.start(STREAM, INTERACTIVE)
    device.submit(PROMPT, LONG, BATCH)
    device.step()
    device.submit(2, LONG, INTERACTIVE)
    device.step()
    steps = [device.step() for _ in range(20)]
    assert max(seconds for _, seconds in steps) < 1.1 * TARGET_S
    urgent, less_urgent = (sum(device.tokens_of(plan, number) for plan, _ in steps) for number in (2, PROMPT))
    assert urgent > 5 * less_urgent
    assert 0.2 * alone_s < less_urgent * RATES.prompt_token_s / len(steps) <= 0.5 * alone_s
