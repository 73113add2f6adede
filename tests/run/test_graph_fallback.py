"""Steps whose graph has not been captured take a larger one, but not one much larger, and not for ever."""

from __future__ import annotations

from millrace.run.graphs import graph_fallback as near_sizes
from millrace.run.graphs.graph_fallback import NearSizes

SIZES = (1, 2, 4, 8, 16, 24, 32)


def name(size: int) -> object:
    return ("a graph of", size)


def test_its_own_graph_or_the_next_larger_one() -> None:
    near = NearSizes(SIZES)
    captured = {name(size) for size in (4, 16, 32)}
    assert [near.choose(size, name, captured) for size in SIZES] == [1, 4, 4, 16, 16, 32, 32]


def test_none_if_there_is_none_of_at_most_twice_the_rows() -> None:
    near = NearSizes(SIZES)
    assert near.choose(8, name, {name(24), name(4)}) == 8
    assert near.choose(32, name, {name(24)}) == 32


def test_what_is_missed_often_is_captured() -> None:
    near = NearSizes(SIZES)
    captured = {name(16)}
    chosen = [near.choose(8, name, captured) for _ in range(near_sizes.PATIENCE + 2)]
    assert chosen == [16] * near_sizes.PATIENCE + [8, 8]
    captured.add(name(8))
    assert near.choose(8, name, captured) == 8
    assert near.choose(16, name, captured) == 16
