"""The host tier: evicted blocks return from host memory, failures and stuck copies only cost time."""

from __future__ import annotations

import pytest
from helpers.tier_bench import BLOCK, NUM_BLOCKS, PROMPT, ROUTES, WORKING_SET, TierBench, prompts, spill

from millrace.params.keeping import Retain
from millrace.plan.kv.host_tier import PATIENCE_S
from millrace.plan.kv.slot_index import SlotIndex


@pytest.mark.parametrize("windows", [(None,), (None, 6), (9, None, 4, None), (10,)])
@pytest.mark.parametrize("copy_steps", [0, 1, 3])
def test_a_working_set_of_three_pools_is_answered_without_recomputing(
    windows: tuple[int | None, ...], copy_steps: int
) -> None:
    bench = TierBench(num_slots=200 * len(windows), windows=windows, copy_steps=copy_steps)
    texts = prompts(WORKING_SET)
    assert [bench.answer(prompt) for prompt in texts] == [0] * WORKING_SET
    for _ in range(2):
        bench.num_computed = 0
        assert [bench.answer(prompt) for prompt in texts] == [PROMPT - BLOCK] * WORKING_SET
        assert bench.num_computed == (BLOCK + 3) * WORKING_SET
    assert bench.scheduler.pool.cached.num_lost == 0
    assert bench.tier.tokens_loaded > WORKING_SET * (PROMPT - BLOCK)


def test_a_working_set_is_loaded_under_steady_pressure() -> None:
    bench = TierBench(copy_steps=2)
    texts = prompts(WORKING_SET)
    for _ in range(3):
        for prompt in texts:
            bench.submit(prompt)
            bench.step()
    bench.run(2000)
    found = [request.cached_tokens for request in bench.requests.values()]
    assert min(found[WORKING_SET:]) == PROMPT - BLOCK
    assert bench.scheduler.pool.cached.num_lost == 0


def test_nothing_is_copied_while_the_pool_has_room() -> None:
    bench = TierBench()
    bench.answer(prompts(1)[0])
    assert bench.num_issued == dict.fromkeys(ROUTES, 0)


def test_requests_with_the_same_arriving_prefix_share_one_arrival() -> None:
    bench, prompt = TierBench(copy_steps=3), prompts(1)[0]
    spill(bench, prompt)
    loaded = bench.num_issued["host device"]
    ids = [bench.submit(prompt), bench.submit(prompt), bench.submit([*prompt, 1, 2])]
    bench.step()
    assert bench.scheduler.num_running == 0, "a request with arriving blocks takes no row"
    bench.run()
    assert bench.num_issued["host device"] - loaded == (PROMPT - BLOCK) // BLOCK
    assert min(bench.requests[id].cached_tokens for id in ids) == PROMPT - BLOCK


def test_tenants_do_not_find_each_others_blocks_in_host_memory() -> None:
    bench, prompt = TierBench(), prompts(1)[0]
    spill(bench, prompt)
    loaded = bench.num_issued["host device"]
    other = bench.submit(prompt, salt=b"other")
    bench.run()
    assert bench.requests[other].cached_tokens == 0
    assert bench.num_issued["host device"] == loaded


def test_a_later_request_overtakes_one_whose_blocks_are_arriving() -> None:
    bench, prompt = TierBench(copy_steps=1), prompts(1)[0]
    spill(bench, prompt)
    bench.copy_steps["host device"] = 8
    waiting = bench.start_loading(prompt)
    quick = bench.submit([1, 2, 3])
    for _ in range(7):
        bench.step()
    assert len(bench.outputs[quick]) == 4
    assert not bench.outputs[waiting]
    bench.run()


def test_aborting_an_arriving_request_keeps_what_arrives() -> None:
    bench, prompt = TierBench(copy_steps=4), prompts(1)[0]
    spill(bench, prompt)
    aborted = bench.start_loading(prompt)
    held = bench.scheduler.pool.num_held
    assert held >= (PROMPT - BLOCK) // BLOCK
    assert bench.scheduler.abort(aborted)
    del bench.outputs[aborted]
    bench.scheduler.take_ended()
    assert bench.scheduler.pool.num_held == held, "blocks are kept until the copy is acknowledged"
    for _ in range(10):
        bench.step()
    assert bench.scheduler.pool.num_held == 0
    loaded = bench.num_issued["host device"]
    assert bench.answer(prompt) == PROMPT - BLOCK
    assert bench.num_issued["host device"] == loaded


def test_a_failed_load_is_computed() -> None:
    bench, prompt = TierBench(), prompts(1)[0]
    spill(bench, prompt)
    bench.fails = {"host device"}
    assert bench.answer(prompt) == 0
    assert bench.tier.copies_failed == (PROMPT - BLOCK) // BLOCK
    bench.fails = set()
    spill(bench, prompt)
    assert bench.answer(prompt) == PROMPT - BLOCK


def test_blocks_that_fail_to_leave_are_evicted() -> None:
    bench = TierBench()
    bench.fails = {"device host"}
    texts = prompts(WORKING_SET)
    for prompt in (*texts, *texts):
        assert bench.answer(prompt) == 0
    assert bench.tier.copies_failed > 0
    assert bench.tier.index.num_used == 0


def test_copies_that_never_end_do_not_stop_serving() -> None:
    bench = TierBench(copy_steps=10_000)
    texts = prompts(WORKING_SET)
    for prompt in texts:
        bench.answer(prompt)
    assert bench.tier.is_stuck
    assert bench.scheduler.pool.cached.num_lost > 0
    assert bench.scheduler.pool.num_held > 0, "blocks that are being copied are never reused"


def test_a_request_whose_copies_never_end_is_computed() -> None:
    bench, prompt = TierBench(), prompts(1)[0]
    spill(bench, prompt)
    bench.copy_steps |= {"device host": 1, "host device": 10_000}
    began = bench.step_no
    assert bench.answer(prompt) == 0
    assert PATIENCE_S < bench.step_no - began < PATIENCE_S + 20
    # When they end after all, the tier works again.
    bench.copies = [(copies, 0) for copies, _ in bench.copies]
    bench.copy_steps["host device"] = 1
    bench.step()
    spill(bench, prompt)
    assert bench.answer(prompt) == PROMPT - BLOCK


def test_loads_only_where_that_beats_computing() -> None:
    bench, prompt = TierBench(), prompts(1)[0]
    bench.block_s = 0.1  # 40 tokens per second
    spill(bench, prompt)
    bench.tier.prefill_tokens_per_s = 50.0
    assert bench.answer(prompt) == 0
    spill(bench, prompt)
    bench.tier.prefill_tokens_per_s = 30.0
    assert bench.answer(prompt) == PROMPT - BLOCK


def test_the_host_index_evicts_the_least_recently_used_and_never_what_copies_use() -> None:
    index = SlotIndex("host", 2)
    first, second, third = (0, b"1"), (0, b"2"), (1, b"1")
    for key in (first, second):
        assert index.fill(key, b"tokens") is not None
    assert index.fill(third, b"tokens") is None
    assert index.find(b"1", b"tokens") is None, "its content has not arrived"
    index.filled(first, failed=False)
    index.filled(second, failed=False)
    index.touch(first)
    assert index.find(b"1", b"tokens") is not None
    assert index.find(b"1", b"other") is None
    assert index.find(b"1", b"tokens", group=1) is None
    slot = index.find(b"2", b"tokens")
    assert index.fill(third, b"tokens") == slot
    assert second not in index
    index.pin(first)
    index.filled(third, failed=True)
    index.check()
    assert index.fill(second, b"tokens") == slot
    assert index.fill(third, b"tokens") is None
    index.unpin(first, failed=True)
    assert first not in index
    index.check()


def test_what_handles_keep_moves_down_and_comes_back() -> None:
    """More than the device holds: none of it is computed again, and other requests are not held up."""
    bench, kept = TierBench(retained=NUM_BLOCKS * 3), prompts(6)
    for number, prompt in enumerate(kept):
        bench.submit(prompt, retain=Retain(1e6, f"session {number}", is_hint=False))
        bench.run()
    [*handles] = bench.scheduler.handles("", 0.0).handles
    assert [one.name for one in handles] == [f"session {number}" for number in range(6)]
    assert all(sum(one.locations.values()) == one.tokens == PROMPT for one in handles)
    assert sum(one.locations["host"] for one in handles) >= 6 * PROMPT - NUM_BLOCKS * BLOCK
    computed = bench.num_computed
    for prompt in kept:
        assert bench.answer([*prompt, 5]) == PROMPT
    assert bench.num_computed - computed <= 6 * (1 + 4)
    assert bench.scheduler.pool.cached.num_lost == 0
