"""`bench plan` measures the scheduler's cost."""

from __future__ import annotations

from millrace.bench.micro.plan import measure_first_cost, measure_plan_cost


def test_a_steady_step_and_a_first_token_have_a_cost() -> None:
    steady = measure_plan_cost(4, num_steps=10)
    assert 0 < steady.plan_ms < steady.total_ms
    first = measure_first_cost(100, num_requests=4)
    assert 0 < first.confirm_ms < first.total_ms
