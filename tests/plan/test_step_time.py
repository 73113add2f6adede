"""The model of step time follows measured steps, ignores disturbed ones and keeps what recent steps do not tell."""

from __future__ import annotations

import random
from dataclasses import astuple

import numpy as np
import pytest

from millrace.plan.pacing.step_time import MAX_PACE, NUM_FIRST, OBSERVE_EVERY, StepRates, StepTimeModel
from millrace.plan.step import NO_EPOCH, StepPlan, exact_shape

SLOW = StepRates(0.019, 0.008, 0.007, 2e-6, 3e-6)
"""A small machine."""
NONE = np.zeros(0, np.int32)


def a_step(starts: list[int], counts: list[int], *, is_repeated: bool = False) -> StepPlan:
    rows = np.arange(len(starts), dtype=np.int32)
    samples = np.ones(len(starts), np.bool_)
    return StepPlan(
        0,
        rows,
        np.array(starts, np.int32),
        np.array(counts, np.int32),
        samples,
        NONE,
        NONE,
        NONE,
        exact_shape(np.array(counts, np.int32)),
        epoch=1 if is_repeated else NO_EPOCH,
    )


def a_random_step(rng: random.Random) -> StepPlan:
    num_decoding = rng.randrange(0, 40) if rng.random() < 0.5 else rng.randrange(0, 4)
    starts, counts = [rng.randrange(2000) for _ in range(num_decoding)], [1] * num_decoding
    if num_decoding == 0 or rng.random() < 0.6:
        starts.append(rng.randrange(4000))
        counts.append(rng.randrange(8, 200))
    return a_step(starts, counts)


def seconds(plan: StepPlan, rates: StepRates = SLOW) -> float:
    parts = [0.0] * 5
    for start, count in zip(plan.starts.tolist(), plan.counts.tolist(), strict=True):
        if count == 1:
            parts[2] += 1
            parts[3] += start + 1
        else:
            parts[1] += count
            parts[4] += count * (start + count / 2)
    parts[0] = 1
    return sum(part * rate for part, rate in zip(parts, astuple(rates), strict=True))


def predicted(model: StepTimeModel, plan: StepPlan) -> float:
    rates = StepRates(model.step_s, model.prompt_token_s, model.decode_row_s, model.context_token_s, model.pair_s)
    return seconds(plan, rates)


@pytest.mark.parametrize("first", [0.05, 0.3, 1.0, 3.0, 20.0])
def test_wrong_first_rates_are_corrected_within_20_steps(first: float) -> None:
    rng = random.Random(3)
    guess = StepRates(*(first * rate for rate in (0.02, 0.005, 0.005, 1e-6, 1e-6)))
    model = StepTimeModel(guess)
    for _ in range(20):
        plan = a_random_step(rng)
        model.observe(plan, seconds(plan) * rng.gauss(1, 0.05))
    errors = []
    for _ in range(200):
        plan = a_random_step(rng)
        errors.append(abs(predicted(model, plan) / seconds(plan) - 1))
        model.observe(plan, seconds(plan) * rng.gauss(1, 0.05))
    assert float(np.median(errors)) < 0.06
    assert sorted(errors)[-10] < 0.5


def test_disturbed_steps_do_not_count() -> None:
    """Other processes make one step in ten ten times as long."""
    rng = random.Random(4)
    model = StepTimeModel(SLOW)
    errors = []
    for number in range(400):
        plan = a_random_step(rng)
        disturbed = 10.0 if rng.random() < 0.1 else 1.0
        model.observe(plan, seconds(plan) * rng.gauss(1, 0.05) * disturbed)
        if number > 50:
            errors.append(predicted(model, plan) / seconds(plan))
    assert 0.95 < float(np.median(errors)) < 1.1
    assert max(errors) < 1.6


def test_a_step_that_costs_far_more_than_its_rows_is_learnt_at_once() -> None:
    """Decode steps ten times as long as expected, prompts as expected."""
    model = StepTimeModel(StepRates(0.01, 0.01, 0.013, 2e-6, 3e-6))
    busy = StepRates(0.2, 0.015, 0.015, 2e-6, 3e-6)
    for number in range(12):
        plan = a_step([32 + number], [1], is_repeated=True) if number % 6 else a_step([0], [32])
        model.observe(plan, seconds(plan, busy))
    assert model.decode_s(1, 50) == pytest.approx(0.215, rel=0.1)
    assert 10 * model.prompt_token_s < 0.5


@pytest.mark.parametrize("factor", [0.2, 4.0])
def test_a_device_that_changes_its_speed_is_followed(factor: float) -> None:
    rng = random.Random(5)
    model = StepTimeModel(SLOW)
    for number in range(100):
        plan = a_random_step(rng)
        model.observe(plan, seconds(plan) * (factor if number >= 60 else 1.0))
    plan = a_step([100, 200, 300], [1, 1, 64])
    assert predicted(model, plan) == pytest.approx(factor * seconds(plan), rel=0.2)


def test_many_decode_steps_leave_the_rates_of_prompts_alone() -> None:
    rng = random.Random(6)
    model = StepTimeModel(StepRates(0.02, 0.005, 0.005, 1e-6, 1e-6))
    for _ in range(100):
        plan = a_random_step(rng)
        model.observe(plan, seconds(plan))
    before = model.prompt_tokens(0.15, 1000)
    for number in range(5000):
        plan = a_step([100 + number % 1000] * 8, [1] * 8)
        model.observe(plan, seconds(plan) * rng.gauss(1, 0.05))
    assert model.prompt_tokens(0.15, 1000) == pytest.approx(before, rel=0.1)


def test_only_some_repeated_decode_steps_are_observed_after_the_first() -> None:
    model = StepTimeModel(SLOW)
    plan = a_step([10, 20], [1, 1], is_repeated=True)
    for _ in range(NUM_FIRST):
        model.observe(plan, seconds(plan))
    before = model.step_s
    for _ in range(OBSERVE_EVERY - 1):
        model.observe(plan, 1.2 * seconds(plan))
    assert model.step_s == before
    model.observe(plan, 1.2 * seconds(plan))
    assert model.step_s > before


def test_steps_with_and_without_prompt_tokens_are_both_observed_if_they_alternate() -> None:
    """The longer ones alone would not tell that those without became slower and prompt tokens faster."""
    model = StepTimeModel(SLOW)
    decode, mixed = a_step([100], [1]), a_step([100, 0], [1, 8])
    for decode_s in [0.024] * NUM_FIRST + [0.036] * 200:
        model.observe(decode, decode_s)
        model.observe(mixed, 0.048)
    assert model.decode_s(1, 100) == pytest.approx(0.036, rel=0.1)


@pytest.mark.parametrize("context", [0, 500, 8000])
def test_prompt_tokens_take_the_given_time(context: int) -> None:
    model = StepTimeModel(SLOW)
    tokens = model.prompt_tokens(0.5, context)

    def takes(count: int) -> float:
        return seconds(a_step([context], [count])) - SLOW.step_s

    assert takes(tokens) <= 0.5 < takes(tokens + 1)
    assert model.prompt_tokens(0.0, context) == model.prompt_tokens(-1.0, context) == 0


def test_the_pace_follows_the_last_steps_and_leaves_the_rates_alone() -> None:
    """A machine that is slower for a few steps: they are disturbed ones, but the next steps are to be shorter."""
    model = StepTimeModel(SLOW, uncertainty=0.05)
    plan = a_step([100, 200], [1, 64])
    for _ in range(NUM_FIRST + 8):
        model.observe(plan, seconds(plan))
    assert model.pace == pytest.approx(1.0)
    before = predicted(model, plan)
    paces = []
    for factor in (1.8, 1.8, 1.8, 1.0, 1.0, 1.0, 1.0):
        model.observe(plan, factor * seconds(plan))
        paces.append(model.pace)
    assert predicted(model, plan) == pytest.approx(before, rel=0.02)
    assert paces[:3] == pytest.approx([1.4, 1.6, 1.7], rel=0.02)
    assert paces[-1] < 1.06
    model.observe(plan, 100 * seconds(plan))
    assert model.pace == MAX_PACE
    model.observe(plan, 0.2 * seconds(plan))
    assert 1.0 <= model.pace < MAX_PACE


def test_repeated_steps_at_once_teach_what_they_teach_one_by_one() -> None:
    rng = random.Random(5)
    single, together = StepTimeModel(SLOW), StepTimeModel(SLOW)
    for _ in range(60):
        mixed = a_random_step(rng)
        for model in (single, together):
            model.observe(mixed, seconds(mixed))
        starts = [rng.randrange(2000) for _ in range(rng.randrange(1, 20))]
        steps = [a_step([start + n for start in starts], [1] * len(starts), is_repeated=True) for n in range(12)]
        took = [seconds(step) * rng.uniform(0.9, 1.1) for step in steps]
        for step, one in zip(steps, took, strict=True):
            single.observe(step, one)
        together.observe_repeated(steps[-1], took)
        assert predicted(single, mixed) == predicted(together, mixed)
