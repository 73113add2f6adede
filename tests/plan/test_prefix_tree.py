"""What is shown of the cache: every block under its state, prefixes as a tree, in a bounded size."""

from __future__ import annotations

from collections import Counter

import pytest
from plan.test_retention import BLOCK, NUM_BLOCKS, Bench, flood, prompt_of

from millrace.params.keeping import Retain
from millrace.plan.kv import prefix_tree
from millrace.plan.planner.protocol import BlockMap, PrefixNode


def map_of(bench: Bench, max_nodes: int = 100) -> BlockMap:
    found = bench.scheduler.block_map(max_nodes, bench.now)
    assert sum(found.states["device"].values()) == NUM_BLOCKS
    assert sum(node.tokens for node in found.nodes) + found.other_tokens == found.tokens
    for at, node in enumerate(found.nodes):
        assert node.parent < at
        if node.parent >= 0:
            before = found.nodes[node.parent]
            assert before.start is None or node.start == before.start + before.tokens
    return found


def shape(node: PrefixNode) -> tuple[int, int | None, int, str]:
    return node.parent, node.start, node.tokens, node.state


def test_prompts_with_a_common_beginning_are_one_node_with_two_branches() -> None:
    bench = Bench()
    common = prompt_of(1, 16)
    bench.ask([*common, *prompt_of(2, 8)])
    bench.now += 5.0
    bench.ask([*common, *prompt_of(3, 12)])
    found = map_of(bench)
    assert found.is_whole
    assert shape(found.nodes[0]) == (-1, 0, 16, "cached")
    assert sorted(map(shape, found.nodes[1:])) == [(0, 16, 8, "cached"), (0, 16, 12, "cached")]
    assert [node.hits for node in found.nodes] == [1, 0, 0]
    assert found.nodes[0].idle_s < 1.0
    assert max(node.idle_s or 0.0 for node in found.nodes) > 4.0
    assert {node.owner for node in found.nodes} == {""}


def test_what_rows_use_share_and_handles_keep_has_its_own_state() -> None:
    bench = Bench()
    common = prompt_of(1, 16)
    bench.ask(common, Retain(name="manual", ttl_s=60.0))
    assert map_of(bench).states["device"]["kept"] == 4
    assert [node.state for node in map_of(bench).nodes] == ["kept"]
    for number in (2, 3):
        bench.submit([*common, *prompt_of(number, 8)], max_tokens=20)
    for _ in range(3):
        plan = bench.scheduler.plan(bench.now)
        assert plan is not None
        bench.scheduler.apply(plan.step_no, *bench.device.run(plan))
    found = map_of(bench)
    assert found.states["device"]["shared"] == 4
    assert found.states["device"]["in_use"] > 0
    assert (found.nodes[0].state, found.nodes[0].refs, found.nodes[0].hits) == ("shared", 2, 2)
    assert {node.state for node in found.nodes[1:]} == {"in_use"}
    bench.run()
    assert map_of(bench).states["device"]["shared"] == 0


def test_blocks_that_moved_to_host_memory_keep_their_place_in_the_tree() -> None:
    bench = Bench(host_slots=200)
    first = prompt_of(1, 20)
    bench.ask(first)
    flood(bench)
    found = map_of(bench)
    assert set(found.states) == {"device", "host"}
    below = [node for node in found.nodes if node.location == "host"]
    assert (-1, 0, 20, "cached") in map(shape, below)  # The whole prompt, from its start.
    assert all(node.start is not None for node in found.nodes)
    assert all(node.idle_s is None for node in below)


def test_the_smallest_nodes_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    for number, length in enumerate((8, 28, 12)):
        bench.ask(prompt_of(number, length))
    whole, found = map_of(bench), map_of(bench, 1)
    assert [node.tokens for node in found.nodes] == [28]
    assert (found.other_nodes, found.other_tokens) == (2, 20)
    assert found.tokens == whole.tokens
    monkeypatch.setattr(prefix_tree, "MAX_WALKED", 4)
    found = map_of(bench)
    assert not found.is_whole  # The prompt of 12 tokens, computed last, and the whole of the one before it.
    assert Counter(node.tokens for node in found.nodes) == {12: 1, 28: 1}


def test_what_lost_its_beginning_says_so_and_owners_are_told_apart() -> None:
    bench = Bench()
    bench.ask(prompt_of(1, 16))
    pool = bench.scheduler.pool
    named, cached = pool.named, pool.cached
    [head] = [digest for digest in named.digests() if bench.scheduler.prefix.is_root(named.parent_hash(digest) or b"")]
    block = named.block_of(head)
    assert block is not None
    cached.remove(block)
    cached.clean.add(block)
    cached.clean.move_to_end(block, last=False)  # type: ignore[attr-defined]
    pool.take_many(pool.num_free + 1)
    found = bench.scheduler.block_map(10, bench.now)
    assert [(node.start, node.tokens) for node in found.nodes] == [(None, 12)]
    assert BLOCK == 4
