"""A trained drafter drafts for the rows in which it pays for its time, and rests where it does not."""

from __future__ import annotations

import numpy as np
import pytest

from millrace.plan.drafting.trained import LENGTHS, TrainedControl

PLAIN_S = 0.010


class Steps:
    """Steps that take 5% longer with each token beyond the rows' own."""

    def step_s(self, num_rows: int, num_tokens: float) -> float:
        return PLAIN_S * (1 + 0.05 * (num_tokens - num_rows))


class Machine:
    """Rows whose drafts are accepted with a probability of their own, given those before. Seconds are computed."""

    def __init__(self, acceptance: list[float], pass_s: float) -> None:
        self.acceptance, self.pass_s = np.array(acceptance), pass_s
        self.rows = np.arange(len(acceptance))
        self.control = TrainedControl(len(acceptance), 7, Steps())
        self.rng = np.random.default_rng(1)
        self.first_id = 100

    def run(self, num_steps: int) -> tuple[float, np.ndarray]:
        """Tokens per second, and the share of steps in which each row had drafts."""
        tokens = seconds = 0.0
        had = np.zeros(len(self.rows))
        for _ in range(num_steps):
            decision = self.control.decide(self.rows, self.rows + self.first_id)
            length = 0 if decision is None else decision.length
            has = np.zeros(len(self.rows), np.bool_) if decision is None else decision.has_drafts
            right = self.rng.random((len(self.rows), length)) < self.acceptance[:, None]
            accepted = np.where(has, np.cumprod(right, axis=1).sum(axis=1), 0)
            own = self.rows[has]
            drafts = np.full(len(own), length, np.int32)
            self.control.observe(own, own + self.first_id, drafts, accepted[has].astype(np.int32))
            drafting_s = self.pass_s * length if has.any() else 0.0
            self.control.observe_time(len(own), length, drafting_s)
            tokens += len(self.rows) + accepted.sum()
            seconds += Steps().step_s(len(self.rows), len(self.rows) + length * len(own)) + drafting_s
            had += has
        return tokens / seconds, had / num_steps


def fixed_rate(acceptance: float, pass_s: float, length: int) -> float:
    expected = sum(acceptance**place for place in range(length + 1))
    return expected / (Steps().step_s(1, 1 + length) + length * pass_s)


@pytest.mark.parametrize("acceptance", [0.0, 0.4, 0.8])
@pytest.mark.parametrize("pass_share", [0.02, 0.3])
def test_the_rate_is_about_that_of_the_best_length(acceptance: float, pass_share: float) -> None:
    machine = Machine([acceptance], pass_share * PLAIN_S)
    machine.run(200)
    rate, _ = machine.run(1000)
    best = max(fixed_rate(acceptance, pass_share * PLAIN_S, length) for length in (0, *LENGTHS))
    assert rate > 0.97 * fixed_rate(acceptance, 0.0, 0)
    assert rate > 0.93 * best


def test_only_rows_that_pay_have_drafts() -> None:
    machine = Machine([0.8, 0.02, 0.8, 0.02], 0.2 * PLAIN_S)
    machine.run(300)
    _, had = machine.run(1000)
    assert had[[0, 2]].min() > 0.9
    assert had[[1, 3]].max() < 0.35


def test_a_drafter_that_loses_rests_until_a_new_request_tries_it_again() -> None:
    machine = Machine([0.05], 0.3 * PLAIN_S)
    machine.run(500)
    control = machine.control
    assert control.num_stops == 1
    _, had = machine.run(1000)
    assert had[0] == 0, "it knows nothing of the row any more"
    assert control.is_idle(machine.rows)
    assert not control.rests, "rows that come now are tried"
    tried = 0.0
    for _ in range(100):
        machine.first_id += 10
        _, had = machine.run(100)
        tried += had[0]
    assert 0 < tried < 0.01 * 100, "trials back off"
    machine.acceptance[:] = 0.9
    for _ in range(100):
        machine.first_id += 10
        machine.run(100)
    _, had = machine.run(500)
    assert had[0] > 0.9


def test_rows_that_began_while_it_rested_stay_without_drafts() -> None:
    machine = Machine([0.05, 0.05], 0.3 * PLAIN_S)
    while not machine.control.rests:
        machine.run(1)
    both, ids = machine.rows, machine.rows + 5000
    while machine.control.rests:
        assert machine.control.decide(both, ids) is None
    ids[1] += 1
    decision = machine.control.decide(both, ids)
    assert decision is not None
    assert decision.has_drafts.tolist() == [False, True]


def test_what_it_is_worth_grows_with_its_acceptance_and_falls_with_its_cost() -> None:
    def worth(acceptance: float, pass_share: float) -> float:
        machine = Machine([acceptance] * 2, pass_share * PLAIN_S)
        machine.run(600)
        found = [machine.control.decide(machine.rows, machine.rows + 100) for _ in range(8)]
        return max((decision.worth for decision in found if decision is not None), default=0.0)

    assert worth(0.8, 0.02) > worth(0.5, 0.02) > 0
    assert worth(0.8, 0.02) > worth(0.8, 0.3)


def test_rows_of_new_requests_start_from_the_average() -> None:
    machine = Machine([0.8, 0.8], 0.05 * PLAIN_S)
    machine.run(400)
    # A decision does not show the averages that it follows from.
    mean = machine.control.mean.copy()
    machine.control.decide(machine.rows, machine.rows + 5000)
    assert np.allclose(machine.control.survival[machine.rows], mean)
