"""`bench plan` measures the scheduler's cost."""

from __future__ import annotations

from millrace.bench.micro.plan import measure_codec_cost, measure_first_cost, measure_plan_cost


def test_a_steady_step_and_a_first_token_have_a_cost() -> None:
    steady = measure_plan_cost(4, num_steps=10)
    assert 0 < steady.plan_ms < steady.total_ms
    first = measure_first_cost(100, num_requests=4)
    assert 0 < first.confirm_ms < first.total_ms


def test_a_step_as_bytes_has_a_cost() -> None:
    codec = measure_codec_cost(32, num_steps=20)
    assert codec.encode_us > 0
    assert codec.decode_us > 0
    assert codec.num_updates >= 2, "32 rows cross two or more block boundaries in every step"
    assert codec.num_bytes <= 100 + 12 * codec.num_updates
