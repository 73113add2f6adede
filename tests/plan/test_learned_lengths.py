"""The regressor of output lengths counts where it is better on requests not seen before, and nowhere else."""

from __future__ import annotations

import math

import numpy as np
import pytest

from millrace.plan.queue import learned_lengths
from millrace.plan.queue.kv_peak import OutputLengthEstimate
from millrace.plan.queue.learned_lengths import LearnedLengths, Sample
from millrace.plan.request import Request


def request(number: int, application: int, length: int, rng: np.random.Generator, num_output: int) -> Request:
    prompt = np.concatenate([np.full(48, application), rng.integers(10, 1000, max(0, length - 48))]).astype(np.int32)
    made = Request(id=number, prompt=prompt, max_tokens=2000)
    made.num_output = num_output
    return made


def learned(num_requests: int, *, has_pattern: bool) -> tuple[LearnedLengths, np.random.Generator]:
    """Two applications of one tenant: one answers briefly, the other as long as its prompts."""
    lengths, rng = LearnedLengths(), np.random.default_rng(1)
    for number in range(num_requests):
        application, length = int(rng.integers(2)), int(rng.integers(100, 900))
        mean = (20 if application else length) if has_pattern else 200
        ended = request(number, application, length, rng, max(1, int(mean * rng.uniform(0.8, 1.2))))
        lengths.observe(ended, float(number))
    return lengths, rng


def test_it_tells_applications_of_a_tenant_apart() -> None:
    lengths, rng = learned(400, has_pattern=True)
    assert lengths.wins
    assert lengths.predict(request(0, 1, 500, rng, 0)) < 60
    assert lengths.predict(request(0, 0, 500, rng, 0)) > 200
    assert lengths.errors[1] < 0.7 * lengths.errors[0]


def test_it_does_not_count_where_it_does_not_win() -> None:
    lengths, rng = learned(400, has_pattern=False)
    one = request(0, 0, 500, rng, 0)
    assert not lengths.wins
    assert math.isnan(lengths.expected(one))
    assert lengths.predict(one) == lengths.averages.predict(one)


def test_it_does_not_count_before_it_has_seen_enough() -> None:
    assert not learned(50, has_pattern=True)[0].wins


def test_a_prediction_is_at_most_the_limit_and_finite() -> None:
    lengths, rng = learned(300, has_pattern=True)
    one = request(0, 0, 900, rng, 0)
    one.max_tokens = 7
    assert lengths.predict(one) <= 7
    for number in range(300):
        lengths.observe(request(0, 0, 1, rng, 0), 400.0 + number)
    assert math.isfinite(lengths.regressor.predict(one))


def test_equal_requests_for_ever_overflow_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the features do not show is not forgotten: the uncertainty would grow without a bound."""
    monkeypatch.setattr(learned_lengths, "FORGETTING", 0.9)  # In 2,000 requests what takes 200,000 otherwise.
    lengths, rng = LearnedLengths(), np.random.default_rng(1)
    one = request(0, 0, 60, rng, 40)
    with np.errstate(all="raise"):
        for number in range(2000):
            lengths.observe(one, float(number))
        assert 35 < lengths.regressor.predict(one) < 45
        for number in range(300):
            lengths.observe(request(number, 1, int(rng.integers(100, 900)), rng, 20), 2000.0 + number)
        assert 10 < lengths.regressor.predict(request(0, 1, 500, rng, 0)) < 40


def test_servers_of_many_short_requests_learn_from_a_sample() -> None:
    """Learning takes longer than all else that a request costs the scheduler."""
    every, burst = Sample(), Sample()
    assert all(every.takes(number / 10) for number in range(100)), "of few requests all are taken"
    taken = [every.takes(20.0 + number / 1000) for number in range(3000)]
    assert 20 <= sum(taken[-2000:]) <= 60, "two seconds"
    assert sum(burst.takes(1.0) for _ in range(512)) < 40, "all at once"
    assert sum(burst.takes(2.0 + number) for number in range(20)) == 19, "all again"


def test_admission_expects_of_a_row_what_was_learned() -> None:
    estimate, known = OutputLengthEstimate(initial=100.0), np.array([np.nan, 20.0])
    found = estimate.remaining(np.array([0.0, 0.0]), np.array([500.0, 500.0]), known)
    assert found.tolist() == pytest.approx([125.0, 25.0])
    assert estimate.remaining_of_one(0, 500, 20.0) == 25.0
    assert estimate.remaining_of_one(0, 500, math.nan) == 125.0
