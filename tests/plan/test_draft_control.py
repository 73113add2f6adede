"""The controller finds the number of drafts that gives the most tokens per second, and turns drafts off where they
lose."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from millrace.plan.drafting.control import FLOOR_STEPS, DraftControl, StepCosts

PLAIN_S = 0.010


class Machine:
    """Runs steps of a fixed number of rows: drafts are accepted with one probability, given those before."""

    def __init__(
        self, num_rows: int, acceptance: float, seconds: Callable[[int, int], float], *, is_padded: bool = True
    ) -> None:
        self.rows = np.arange(num_rows)
        self.acceptance, self.seconds = acceptance, seconds
        self.control = DraftControl(num_rows, 7, is_padded=is_padded)
        self.rng = np.random.default_rng(1)
        self.is_padded = is_padded

    def run(self, num_steps: int) -> tuple[float, float, dict[int, int]]:
        """Tokens, seconds, and steps by number of drafts."""
        tokens = took = 0.0
        used: dict[int, int] = {}
        num_rows = len(self.rows)
        for _ in range(num_steps):
            length = self.control.decide(self.rows, self.rows + 100).max_drafts
            used[length] = used.get(length, 0) + 1
            is_right = self.rng.random((num_rows, length)) < self.acceptance
            accepted = np.cumprod(is_right, axis=1).sum(axis=1).astype(np.int32)
            computed = num_rows * (1 + length)
            seconds = self.seconds(num_rows, computed) * self.rng.uniform(0.9, 1.1)
            if length:
                drafts = np.full(num_rows, length, np.int32)
                self.control.observe_drafts(self.rows, self.rows + 100, drafts, accepted)
            self.control.observe_time(num_rows, computed, seconds, has_places=length > 0)
            tokens += num_rows + float(accepted.sum())
            took += seconds
        return tokens, took, used

    def best_rate(self) -> float:
        num_rows = len(self.rows)
        rates = []
        for length in (0, 1, 3, 7):
            expected = sum(self.acceptance**place for place in range(length + 1))
            rates.append(num_rows * expected / self.seconds(num_rows, num_rows * (1 + length)))
        return max(rates)


def memory_bound(num_rows: int, computed: int) -> float:
    """Like a GPU: tokens are almost free up to some number."""
    return PLAIN_S * max(1.0 + 0.0005 * computed, computed / 200)


def compute_bound(num_rows: int, computed: int) -> float:
    return PLAIN_S * (0.5 + 0.5 * computed)


@pytest.mark.parametrize("num_rows", [1, 8, 32, 128])
@pytest.mark.parametrize("acceptance", [0.0, 0.6, 0.8])
@pytest.mark.parametrize("seconds", [memory_bound, compute_bound])
def test_the_rate_is_that_of_the_best_fixed_length(
    num_rows: int, acceptance: float, seconds: Callable[[int, int], float]
) -> None:
    machine = Machine(num_rows, acceptance, seconds)
    machine.run(200)
    tokens, took, _ = machine.run(1200)
    off = num_rows / seconds(num_rows, num_rows)
    assert tokens / took > 0.97 * off
    assert tokens / took > 0.95 * machine.best_rate() or machine.best_rate() < 1.1 * off


def test_drafts_that_lose_are_tried_again_seldom_and_come_back() -> None:
    machine = Machine(128, 0.0, memory_bound)
    machine.run(500)
    _, _, used = machine.run(2000)
    assert used[0] > 1900
    machine.acceptance = 0.95
    machine.run(2500)
    _, _, used = machine.run(500)
    assert used[1] > 450, "the length with the highest rate at this load"
    assert machine.control.num_probes > 0


def test_drafts_that_are_never_accepted_end_even_if_they_seem_free() -> None:
    machine = Machine(4, 0.0, lambda num_rows, computed: PLAIN_S)
    machine.run(300)
    _, _, used = machine.run(2000)
    assert used[0] > 1900


def test_rows_of_new_requests_start_from_the_average() -> None:
    machine = Machine(4, 0.8, memory_bound)
    machine.run(300)
    # A decision does not show the averages that it follows from.
    before = machine.control.mean_survival.copy()
    machine.control.decide(machine.rows, machine.rows + 5000)
    assert np.allclose(machine.control.survival[machine.rows], before)


def test_a_longer_step_is_never_predicted_to_be_faster() -> None:
    costs = StepCosts()
    for size, seconds in ((1, 0.02), (4, 0.015), (16, 0.03)):
        costs.observe(size, seconds)
    assert costs.seconds(1) <= costs.seconds(4) <= costs.seconds(10) < costs.seconds(64)
    assert costs.knows(5)
    assert not costs.knows(8)


def test_where_drafters_weigh_their_drafts_only_the_least_probability_follows_from_costs() -> None:
    """One likely draft per step: that there are few says nothing against more of them."""
    control, row, ids = DraftControl(1, 15, is_padded=False, is_weighed=True), np.array([0]), np.array([7])

    def run(num_steps: int, accepted: int, price: float) -> set[int]:
        decisions = set()
        for _ in range(num_steps):
            decision = control.decide(row, ids)
            decisions.add(decision.max_drafts)
            drafts = 1 if decision.max_drafts else 0
            if drafts:
                control.observe_drafts(row, ids, np.array([1], np.int32), np.array([accepted], np.int32))
            control.observe_time(1, 1 + drafts, PLAIN_S * (1 + price * drafts), has_places=drafts > 0)
            if drafts:  # one in which nothing was found
                control.observe_time(1, 1, PLAIN_S, has_places=True)
        return decisions

    def floor() -> float:
        return [control.decide(row, ids).min_probability for _ in range(FLOOR_STEPS + 4)][-1]

    assert run(60, 1, 0.1) == {0, 15}, "0 to measure plain steps"
    assert floor() == pytest.approx(0.18, abs=0.02), "0.1 steps at 1.8 tokens per step"
    run(200, 0, 0.1)
    assert floor() == pytest.approx(0.09, abs=0.02), "time is worth fewer tokens"
    run(200, 0, 0.5)
    assert floor() > 0.3
    assert control.length == 15


def test_a_disturbed_start_does_not_end_drafts_for_good() -> None:
    """Short steps with drafts seem slow at first. No draft is then worth it, so none would ever be measured again."""
    control, row = DraftControl(1, 15, is_padded=False, is_weighed=True), np.array([0])
    together = 0.85 ** np.arange(1, 16)
    lengths = []
    for step in range(600):
        ids = np.array([100 + step // 64])
        decision = control.decide(row, ids)
        length = int((together[: decision.max_drafts] >= decision.min_probability).sum())
        is_disturbed = step < 30
        if is_disturbed:
            length = min(length, 2)
        if decision.max_drafts:
            drafts = np.array([length], np.int32)
            control.observe_drafts(row, ids, drafts, drafts)
        seconds = PLAIN_S * (1 + 0.05 * length) * (4 if is_disturbed and length else 1)
        control.observe_time(1, 1 + length, seconds, has_places=decision.max_drafts > 0)
        lengths.append(length)
    assert np.mean(lengths[300:]) > 5
