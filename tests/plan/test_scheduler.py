"""Single behaviours of the scheduler."""

from __future__ import annotations

import numpy as np
from helpers.toy_device import ToyDevice

from millrace.plan.queue.kv_peak import kv_peak
from millrace.plan.request import Request
from millrace.plan.scheduler import Scheduler, SchedulerSettings


def make(num_blocks: int = 64, block_size: int = 4, max_running: int = 8, **more: int) -> Scheduler:
    return Scheduler(
        SchedulerSettings(
            num_blocks=num_blocks,
            block_size=block_size,
            max_running=max_running,
            token_budget=more.pop("token_budget", 64),
            **more,
        )
    )


def request(request_id: int, prompt: list[int], max_tokens: int = 4, **more) -> Request:
    return Request(id=request_id, prompt=np.asarray(prompt, np.int32), max_tokens=max_tokens, **more)


def run_to_end(scheduler: Scheduler, device: ToyDevice) -> dict[int, list[int]]:
    outputs: dict[int, list[int]] = {}
    for step in range(10_000):
        plan = scheduler.plan(float(step))
        if plan is None:
            break
        outcome = scheduler.apply(plan.step_no, *device.run(plan))
        for request_id, token in zip(outcome.request_ids.tolist(), outcome.tokens.tolist(), strict=True):
            outputs.setdefault(request_id, []).append(token)
    return outputs


def test_a_prompt_is_split_by_the_budget_and_decoding_goes_first() -> None:
    scheduler, device = make(token_budget=10), ToyDevice(64, 4, 8, 7)
    scheduler.submit(request(0, [1, 2, 3]))
    first = scheduler.plan(0.0)
    assert first is not None
    scheduler.apply(first.step_no, *device.run(first))
    scheduler.submit(request(1, list(range(25))))
    second = scheduler.plan(1.0)
    assert second is not None
    assert second.counts.tolist() == [1, 10]
    assert second.samples.tolist() == [True, False]


def test_a_step_that_decodes_is_kept_short() -> None:
    scheduler, device = make(token_budget=64, mixed_budget=8), ToyDevice(64, 4, 8, 7)
    scheduler.submit(request(0, list(range(20))))
    first = scheduler.plan(0.0)
    assert first is not None
    assert first.counts.tolist() == [20]
    scheduler.apply(first.step_no, *device.run(first))
    scheduler.submit(request(1, list(range(100, 150))))
    second = scheduler.plan(1.0)
    assert second is not None
    assert second.counts.tolist() == [1, 7]


def test_a_prefix_is_found_and_one_token_is_always_recomputed() -> None:
    scheduler, device = make(), ToyDevice(64, 4, 8, 7)
    scheduler.submit(request(0, list(range(16)), max_tokens=1))
    run_to_end(scheduler, device)
    scheduler.submit(request(1, list(range(16)), max_tokens=1))
    plan = scheduler.plan(0.0)
    assert plan is not None
    assert plan.starts.tolist() == [12]
    assert plan.counts.tolist() == [4]


def test_requests_with_different_salts_share_no_blocks() -> None:
    scheduler, device = make(), ToyDevice(64, 4, 8, 7)
    scheduler.submit(request(0, list(range(16)), max_tokens=1))
    run_to_end(scheduler, device)
    scheduler.submit(request(1, list(range(16)), max_tokens=1, salt=b"tenant"))
    plan = scheduler.plan(0.0)
    assert plan is not None
    assert plan.starts.tolist() == [0]


def test_equal_prompts_arriving_together_share_blocks() -> None:
    """n choices of one prompt: the first computes it, the others wait one step and get a prefix hit."""
    scheduler, device = make(), ToyDevice(64, 4, 8, 7)
    for index in range(4):
        scheduler.submit(request(index, list(range(17)), max_tokens=3))
    first = scheduler.plan(0.0)
    assert first is not None
    assert first.counts.tolist() == [17]
    scheduler.apply(first.step_no, *device.run(first))
    second = scheduler.plan(1.0)
    assert second is not None
    assert sorted(second.counts.tolist()) == [1, 1, 1, 1]
    assert scheduler.pool.num_in_use == 4 + 4


def test_preemption_chooses_the_cheapest_row_but_never_the_first() -> None:
    scheduler = make(num_blocks=12, block_size=4, max_running=4, expected_output=1)
    device = ToyDevice(12, 4, 4, 7)
    scheduler.submit(request(0, list(range(8)), max_tokens=24))
    scheduler.submit(request(1, list(range(20, 32)), max_tokens=24))
    scheduler.submit(request(2, [50, 51], max_tokens=24))
    preempted: list[int] = []
    for step in range(200):
        plan = scheduler.plan(float(step))
        if plan is None:
            break
        preempted += [release.request_id for release in plan.released if release.reason == "preempted"]
        scheduler.apply(plan.step_no, *device.run(plan))
    assert preempted
    assert 0 not in preempted
    assert scheduler.pool.num_in_use == 0


def test_blocks_of_an_aborted_request_are_fenced_by_the_step_in_flight() -> None:
    scheduler, device = make(num_blocks=8, block_size=4), ToyDevice(8, 4, 8, 7)
    scheduler.submit(request(0, list(range(8))))
    plan = scheduler.plan(0.0)
    assert plan is not None
    scheduler.abort(0)
    assert scheduler.pool.num_fenced == 2
    assert scheduler.pool.num_available == 6
    outcome = scheduler.apply(plan.step_no, *device.run(plan))
    assert len(outcome.tokens) == 0
    assert scheduler.pool.num_fenced == 0
    assert scheduler.pool.num_available == 8
    assert [event.reason for event in outcome.ended] == ["abort"]


def test_a_deadline_ends_waiting_and_running_requests() -> None:
    scheduler, device = make(max_running=1), ToyDevice(64, 4, 1, 7)
    scheduler.submit(request(0, [1, 2], max_tokens=50, deadline=5.0))
    scheduler.submit(request(1, [3, 4], max_tokens=50, deadline=3.0))
    reasons: dict[int, str] = {}
    for now in range(8):
        plan = scheduler.plan(float(now))
        ended = scheduler.take_ended()
        if plan is not None:
            ended += scheduler.apply(plan.step_no, *device.run(plan)).ended
        reasons.update({event.request_id: event.reason for event in ended})
    assert reasons == {0: "deadline", 1: "deadline"}
    assert not scheduler.has_work


def test_a_request_that_can_never_fit_ends_with_an_error() -> None:
    scheduler = make(num_blocks=4, block_size=4)
    scheduler.submit(request(0, list(range(10)), max_tokens=20))
    (ended,) = scheduler.take_ended()
    assert ended.reason == "error"
    assert "30 tokens" in ended.message
    assert "max_tokens" in ended.message


def test_admission_follows_the_forecast_peak() -> None:
    """Two requests of 8 + 24 tokens fit into 20 blocks of 4, three do not: the third waits."""
    scheduler, device = make(num_blocks=20, block_size=4), ToyDevice(20, 4, 8, 7)
    for index in range(3):
        scheduler.submit(request(index, [index * 10 + i for i in range(8)], max_tokens=24))
    plan = scheduler.plan(0.0)
    assert plan is not None
    assert len(plan.rows) == 2
    scheduler.apply(plan.step_no, *device.run(plan))
    outputs = run_to_end(scheduler, device)
    assert {len(tokens) for tokens in outputs.values()} == {23, 24}
    assert scheduler.num_preemptions == 0


def test_kv_peak_is_exact() -> None:
    held, remaining = np.asarray([5.0, 3.0, 8.0]), np.asarray([10.0, 2.0, 4.0])
    brute = max(sum(h + min(r, t) for h, r in zip(held, remaining, strict=True) if r >= t) for t in range(11))
    assert kv_peak(held, remaining) == brute


def test_all_end_tokens_of_a_long_list_count() -> None:
    scheduler, device = make(), ToyDevice(64, 4, 8, 1000)
    scheduler.submit(request(0, [5], max_tokens=50, end_token_ids=tuple(range(1000))))
    plan = scheduler.plan(0.0)
    assert plan is not None
    outcome = scheduler.apply(plan.step_no, *device.run(plan))
    assert outcome.ended[0].reason == "stop"
    assert len(outcome.tokens) == 0
    assert outcome.ended[0].num_output == 1


def test_confirm_returns_the_outcome_before_rows_are_released() -> None:
    scheduler, device = make(), ToyDevice(64, 4, 8, 7)
    scheduler.submit(request(0, list(range(9)), max_tokens=1))
    scheduler.submit(request(1, list(range(50, 59)), max_tokens=5))
    plan = scheduler.plan(0.0)
    assert plan is not None
    outcome = scheduler.confirm(plan.step_no, *device.run(plan))
    assert outcome.request_ids.tolist() == outcome.first_ids.tolist() == [0, 1]
    assert [(ended.request_id, ended.reason, ended.num_output) for ended in outcome.ended] == [(0, "length", 1)]
    assert scheduler.num_running == 2, "no row is released yet"
    # The next call does the deferred work first: here, an abort of the request that has ended.
    assert not scheduler.abort(0)
    assert scheduler.num_running == 1
    assert scheduler.pool.num_cached == 2
    scheduler.pool.check()
    assert len(run_to_end(scheduler, device)[1]) == 4
    assert scheduler.take_ended() == ()


def test_a_pending_outcome_is_discarded_when_a_row_is_released() -> None:
    scheduler, device = make(), ToyDevice(64, 4, 8, 7)
    for index in range(3):
        scheduler.submit(request(index, list(range(10 * index, 10 * index + 9)), max_tokens=1))
    plan = scheduler.plan(0.0)
    assert plan is not None
    tokens, _ = device.run(plan)
    scheduler.prepare_outcome()
    assert scheduler.abort(1)
    assert [event.reason for event in scheduler.take_ended()] == ["abort"]
    outcome = scheduler.confirm(plan.step_no, tokens)
    assert outcome.request_ids.tolist() == outcome.first_ids.tolist() == [0, 2]
    assert outcome.sample_index.tolist() == [0, 2]
    assert outcome.tokens.tolist() == tokens[[0, 2]].tolist()
    assert [event.request_id for event in outcome.ended] == [0, 2]
    scheduler.prepare_outcome()  # No step is in flight.
    assert scheduler.num_running == 0


def test_an_equal_prompt_waits_for_the_prefix_of_one_just_admitted() -> None:
    """Blocks being computed are hashed late, but before the next request is matched."""
    for runs_deferred in (False, True):
        scheduler, device = make(), ToyDevice(64, 4, 8, 7)
        for index in range(2):
            scheduler.submit(request(index, list(range(13)), max_tokens=2))
        plan = scheduler.plan(0.0)
        assert plan is not None
        if runs_deferred:
            scheduler.run_deferred()
        assert [admission.request_id for admission in plan.admitted] == [0]
        assert scheduler.plan(0.0) is not None, "the first request decodes; the second still waits"
        assert len(scheduler.waiting) == 1
        scheduler.apply(plan.step_no, *device.run(plan))
        plan = scheduler.plan(1.0)
        assert plan is not None
        assert [(row.request_id, int(plan.starts[-1])) for row in plan.admitted] == [(1, 12)]


def test_hashes_found_through_children_equal_computed_ones() -> None:
    """Matching follows registered children and falls back to hashing where prompts diverge."""
    long = list(range(40))
    second, third = [*long[:16], *range(100, 120)], [*long[:20], *range(200, 216)]
    for other, num_cached in ((long, 36), (second, 32), (third, 20)):
        scheduler, device = make(), ToyDevice(64, 4, 8, 7)
        for index, prompt in enumerate((long, second, other)):
            matched = request(index, prompt, max_tokens=1)
            scheduler.submit(matched)
            run_to_end(scheduler, device)
        fresh, alone = request(0, other, max_tokens=1), make()
        alone.submit(fresh)
        run_to_end(alone, ToyDevice(64, 4, 8, 7))
        assert matched.hashes == fresh.hashes
        assert matched.cached_tokens == num_cached
        scheduler.pool.check()


def test_tokens_beyond_what_the_requests_need_are_counted_as_recomputed() -> None:
    scheduler, device = make(num_blocks=12, block_size=4, max_running=4, expected_output=1), ToyDevice(12, 4, 4, 7)
    requests = [request(0, list(range(8)), 24), request(1, list(range(20, 32)), 24), request(2, [50, 51], 24)]
    for one in requests:
        scheduler.submit(one)
    computed = 0
    for step in range(200):
        plan = scheduler.plan(float(step))
        if plan is None:
            break
        computed += int(plan.counts.sum())
        scheduler.apply(plan.step_no, *device.run(plan))
    assert scheduler.num_preemptions
    # The last token of an answer is never computed.
    needed = sum(one.num_prompt + one.max_tokens - 1 for one in requests)
    assert computed - needed == scheduler.figures(0.0).recomputed_tokens > 0
    assert scheduler.num_discarded == 0


def test_tokens_of_an_aborted_request_are_counted_as_discarded_but_not_those_it_found_or_finished() -> None:
    scheduler, device = make(), ToyDevice(64, 4, 8, 7)

    def run(request_id: int, num_steps: int, reason: str) -> None:
        scheduler.submit(request(request_id, list(range(9)), max_tokens=20))
        for step in range(num_steps):
            plan = scheduler.plan(float(step))
            assert plan is not None
            scheduler.apply(plan.step_no, *device.run(plan))
        scheduler.abort(request_id, reason)  # type: ignore[arg-type]

    run(0, 3, "abort")
    assert scheduler.num_discarded == 9 + 2
    run(1, 3, "cancelled")
    assert scheduler.num_discarded == 11 + (9 - 8) + 2, "two blocks of four were found in the cache"
    run(2, 3, "stop")
    assert scheduler.num_discarded == 14, "a stop string ends an answer well"


def test_tokens_that_another_engine_computed_are_recomputed() -> None:
    scheduler, device = make(), ToyDevice(64, 4, 8, 7)
    scheduler.submit(request(0, list(range(9)), max_tokens=8, output=np.asarray([4, 5, 6], np.int32).tobytes()))
    run_to_end(scheduler, device)
    assert scheduler.figures(0.0).recomputed_tokens == 9 + 2
