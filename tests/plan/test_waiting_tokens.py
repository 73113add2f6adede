"""Tokens in front of a new request: a prefix that several requests share, waiting or running, counts once."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from millrace.plan.figures import prefill_tokens
from millrace.plan.request import Request
from millrace.plan.scheduler import Scheduler, SchedulerSettings

BLOCK = 16
_ids = itertools.count()


def request(tokens: list[int], priority: int = 1, **more: bool) -> Request:
    return Request(id=next(_ids), prompt=np.array(tokens, np.int32), max_tokens=4, priority=priority, **more)


def scheduler(**more: int) -> Scheduler:
    return Scheduler(SchedulerSettings(num_blocks=1024, block_size=BLOCK, max_running=8, token_budget=32, **more))


def test_copies_of_a_running_prompt_count_only_what_they_compute_themselves() -> None:
    planner, prompt = scheduler(), list(range(100, 500))
    planner.submit(request(prompt))
    planner.plan(0.0)
    assert prefill_tokens(planner.rows) == (0, 400 - 32, 0)
    for _ in range(3):
        planner.submit(request(prompt))
    # 400 tokens are 25 blocks; the last is always computed, because at least one token is left to draw from.
    assert planner.waiting.tokens.by_class() == (0, 3 * BLOCK, 0)


def test_copies_that_wait_together_count_their_prefix_once() -> None:
    planner = scheduler()
    prefix = list(range(160))
    for last in range(5):
        planner.submit(request([*prefix, 1000 + last], priority=last % 2))
    assert planner.waiting.tokens.by_class() == (161 + 2, 2, 0)


def test_a_request_that_does_not_read_the_cache_counts_in_full() -> None:
    planner = scheduler()
    for reads in (True, False, False):
        planner.submit(request(list(range(100)), read_cache=reads))
    assert planner.waiting.tokens.by_class() == (0, 300, 0)


def test_an_admitted_request_is_counted_as_running() -> None:
    planner = scheduler()
    planner.submit(request(list(range(100))))
    assert planner.waiting.tokens.by_class() == (0, 100, 0)
    planner.plan(0.0)
    assert planner.waiting.tokens.by_class() == (0, 0, 0)
    assert prefill_tokens(planner.rows) == (0, 100 - 32, 0)


PROMPTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=8)
"""Each number stands for a whole block."""


@given(PROMPTS, st.data())
def test_the_count_is_that_of_distinct_prefixes_and_returns_to_zero(
    prompts: list[list[int]], data: st.DataObject
) -> None:
    planner = scheduler()
    added = [request([1 + block for block in blocks for _ in range(BLOCK)]) for blocks in prompts]
    for one in added:
        planner.submit(one)
        if data.draw(st.booleans()):
            planner.waiting.tokens.by_class()
    # The block with the last token is computed by each request itself.
    shared = {tuple(blocks[: end + 1]) for blocks in prompts for end in range(len(blocks) - 1)}
    assert planner.waiting.tokens.by_class() == (0, BLOCK * (len(shared) + len(prompts)), 0)
    for one in data.draw(st.permutations(added)):
        planner.abort(one.id, "cancelled", "")
        assert planner.waiting.tokens.by_class()[1] >= 0
    assert planner.waiting.tokens.by_class() == (0, 0, 0)
