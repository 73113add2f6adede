"""The disk tier: blocks return from the disk, also after a restart; a failing or slow disk only costs time."""

from __future__ import annotations

import pytest
from helpers.tier_bench import BLOCK, PROMPT, WORKING_SET, TierBench, prompts, spill

from millrace.plan.kv.disk_tier import LONGEST_PAUSE_S, MAX_BATCHES, MAX_RETURNS, PATIENCE_S
from millrace.plan.kv.slot_index import SlotIndex

HOST_SLOTS, DISK_SLOTS = 40, 400
FOUND = PROMPT - BLOCK


def disk_bench(windows: tuple[int | None, ...] = (None,), **settings: int) -> TierBench:
    num = len(windows)
    return TierBench(HOST_SLOTS * num, windows=windows, disk_slots=DISK_SLOTS * num, batch=3 * num, **settings)


def restarted(before: TierBench) -> TierBench:
    """Another process with the same disk."""
    after = disk_bench()
    after.device.beside["disk"], after.stored = before.device.beside["disk"], before.stored
    after.disk.restore(before.stored.items())
    return after


def rest(bench: TierBench) -> None:
    """Let time pass with nothing to do, until no copy is in flight."""
    for _ in range(100):
        issued, was_quiet = dict(bench.num_issued), not bench.copies
        bench.step()
        if was_quiet and bench.num_issued == issued:
            return
    pytest.fail("copies never ended")


@pytest.mark.parametrize("windows", [(None,), (None, 6), (9, None, 4, None), (10,)])
@pytest.mark.parametrize("copy_steps", [0, 1, 3])
def test_a_working_set_beyond_host_memory_is_answered_without_recomputing(
    windows: tuple[int | None, ...], copy_steps: int
) -> None:
    bench, texts = disk_bench(windows, copy_steps=copy_steps), prompts(WORKING_SET)
    for prompt in texts:
        bench.answer(prompt)
        rest(bench)
    assert [bench.answer(prompt) for prompt in texts] == [FOUND] * WORKING_SET
    assert bench.disk.tokens_read > 0


def test_a_restart_finds_what_the_disk_has() -> None:
    before, texts = disk_bench(), prompts(WORKING_SET)
    for prompt in texts:
        before.answer(prompt)
    rest(before)
    figures = before.scheduler.figures(0.0)
    assert figures.evictions_below["disk"] == {"room": 0, "failed": 0, "forgotten": 0}
    assert figures.evictions_below["host"]["room"] > 0
    after = restarted(before)
    assert [after.answer(prompt) for prompt in texts] == [FOUND] * WORKING_SET
    assert after.disk.tokens_read == FOUND * WORKING_SET
    noted = [request.diagnostics for request in after.requests.values()]
    assert [(one.read_tokens, one.loaded_tokens) for one in noted] == [(FOUND, FOUND)] * WORKING_SET


def test_the_tree_shows_after_a_restart_where_each_block_of_the_disk_belongs() -> None:
    before, texts = disk_bench(), prompts(WORKING_SET)
    for prompt in texts:
        before.answer(prompt)
        rest(before)
    before.scheduler.settle(float(before.step_no))
    rest(before)
    found = restarted(before).scheduler.block_map(100, 0.0)
    assert {node.location for node in found.nodes} == {"disk"}
    assert {node.start for node in found.nodes if node.parent < 0} == {0}
    assert sum(node.tokens for node in found.nodes) == BLOCK * len(before.stored)


def test_what_is_settled_outlives_the_process_though_nothing_was_evicted() -> None:
    before, prompt = disk_bench(), prompts(1)[0]
    before.answer(prompt)
    for _ in range(20):
        before.scheduler.settle(float(before.step_no))
        before.step()
    assert restarted(before).answer(prompt) == FOUND


def test_later_requests_overtake_and_those_with_the_same_prefix_wait_too() -> None:
    bench, prompt = disk_bench(copy_steps=1), prompts(1)[0]
    spill(bench, prompt)
    bench.copy_steps["disk host"] = 2
    read = bench.num_issued["disk host"]
    ids = [bench.submit(prompt), bench.submit([*prompt, 1, 2])]
    bench.step()
    assert bench.scheduler.num_running == 0, "a request with arriving blocks takes no row"
    quick = bench.submit([1, 2, 3])
    bench.step()
    assert bench.outputs[quick]
    bench.run()
    assert bench.num_issued["disk host"] - read == FOUND // BLOCK
    assert min(bench.requests[id].cached_tokens for id in ids) == FOUND


def test_tenants_do_not_find_each_others_blocks_on_the_disk() -> None:
    bench, prompt = disk_bench(), prompts(1)[0]
    spill(bench, prompt)
    read = bench.num_issued["disk host"]
    other = bench.submit(prompt, salt=b"other")
    bench.run()
    assert bench.requests[other].cached_tokens == 0
    assert bench.num_issued["disk host"] == read


def test_an_unreadable_block_costs_itself_and_what_follows_it() -> None:
    bench, prompt = disk_bench(), prompts(1)[0]
    spill(bench, prompt)
    rest(bench)
    first = bench.submit(prompt)
    digest = bench.scheduler.prefix.hash_of(bench.requests[first], 4)
    tokens = bench.scheduler.prefix.tokens_of(bench.requests[first], 4)
    slot = bench.disk.index.find(digest, tokens)
    assert slot is not None
    bench.unreadable = {slot}
    bench.run()
    assert bench.requests[first].cached_tokens == 4 * BLOCK
    assert bench.disk.reads_failed == 1
    assert bench.disk.index.find(digest, tokens) is None or bench.disk.index.find(digest, tokens) != slot


def test_a_disk_that_fails_is_asked_less_and_less_often() -> None:
    bench = disk_bench()
    bench.fails = {"host disk", "disk host"}
    texts = prompts(WORKING_SET)
    for prompt in (*texts, *texts):
        assert bench.answer(prompt) <= FOUND
    tried = bench.num_issued["host disk"]
    assert bench.disk.writes_failed == tried > 0
    assert bench.disk.index.num_used == 0
    for _ in range(int(LONGEST_PAUSE_S) * 20):
        bench.step()
    rounds = (bench.num_issued["host disk"] - tried) / bench.tier.settings.max_blocks
    assert 1 <= rounds <= 20 * 4 + 12, "at most a few batches a minute"
    bench.fails = set()
    for _ in range(int(LONGEST_PAUSE_S) + 40):
        bench.step()
    assert bench.disk.blocks_written > 0


def test_failing_reads_are_computed_and_pause() -> None:
    bench, prompt = disk_bench(), prompts(1)[0]
    spill(bench, prompt)
    rest(bench)
    bench.fails = {"disk host"}
    assert bench.answer(prompt) == 0
    assert 1 <= bench.disk.reads_failed <= MAX_BATCHES, "after the first failure nothing further of the prefix is read"


def test_reads_that_never_end_hold_nobody_for_long() -> None:
    bench, prompt = disk_bench(copy_steps=1), prompts(1)[0]
    spill(bench, prompt)
    bench.copy_steps |= {"disk host": 10_000, "host disk": 10_000}
    began = bench.step_no
    assert bench.answer(prompt) == 0
    assert PATIENCE_S < bench.step_no - began < PATIENCE_S + 12
    assert bench.disk.is_stuck
    issued = bench.num_issued["disk host"]
    for other in prompts(4):
        bench.answer(other)
    assert bench.num_issued["disk host"] == issued, "a stuck disk is not asked again"
    bench.copies = [(copies, 0) for copies, _ in bench.copies]
    bench.copy_steps |= {"disk host": 1, "host disk": 1}
    bench.step()
    assert not bench.disk.is_stuck
    spill(bench, prompt)
    assert bench.answer(prompt) == FOUND


def test_writes_that_never_end_hold_nobody() -> None:
    bench, texts = disk_bench(copy_steps=1), prompts(WORKING_SET)
    bench.copy_steps["host disk"] = 10_000
    steps = [0, 0]
    for number in range(2):
        began = bench.step_no
        for prompt in texts:
            bench.answer(prompt)
        steps[number] = bench.step_no - began
        bench.copy_steps["host disk"] = 10_000
    assert bench.disk.num_lost > 0
    plain = TierBench(HOST_SLOTS, copy_steps=1)
    for _ in range(2):
        for prompt in texts:
            plain.answer(prompt)
    assert sum(steps) <= plain.step_no + 8, "steps beside a stopped writer"


def test_a_disk_slower_than_computing_is_not_read() -> None:
    bench, prompt = disk_bench(), prompts(1)[0]
    bench.block_s = 0.1  # 40 tokens per second, in each of two copies
    spill(bench, prompt)
    assert bench.answer(prompts(2)[1]) == FOUND
    bench.tier.prefill_tokens_per_s = 30.0
    read = bench.num_issued["disk host"]
    assert bench.answer(prompt) < FOUND
    assert bench.num_issued["disk host"] == read
    for _ in range(70):  # Its rate is measured anew.
        bench.step()
    bench.block_s = 0.01
    bench.answer(prompts(3)[2])
    assert bench.num_issued["disk host"] > read


def test_a_prefix_longer_than_host_memory_returns_in_parts() -> None:
    bench, prompt = TierBench(8, copy_steps=1, disk_slots=DISK_SLOTS), prompts(1)[0]
    bench.answer(prompt)
    rest(bench)
    for other in prompts(WORKING_SET)[1:]:
        bench.answer(other)
    assert bench.answer(prompt) >= 8 // 2 * BLOCK
    assert max(request.returns for request in bench.requests.values()) <= MAX_RETURNS


def test_the_disk_never_holds_more_than_its_slots() -> None:
    bench = TierBench(HOST_SLOTS, copy_steps=1, disk_slots=10)
    for prompt in prompts(WORKING_SET):
        bench.answer(prompt)
        rest(bench)
    assert bench.disk.index.num_evicted["room"] > 0
    assert set(bench.stored) <= set(range(10))


def test_a_pinned_block_keeps_its_place_in_the_order() -> None:
    index = SlotIndex("host", 2)
    for digest in (b"1", b"2"):
        index.fill((0, digest), b"tokens")
        index.filled((0, digest), failed=False)
    index.pin((0, b"1"))
    assert index.next_evicted() == (0, b"2")
    index.unpin((0, b"1"), failed=False)
    assert index.next_evicted() == (0, b"1")
    index.check()
