"""Graph fallback: a larger graph stands in for a missing one, within limits of size and time."""

from __future__ import annotations

from millrace.plan.shapes import fallback as graph_fallback
from millrace.plan.shapes.fallback import GraphFallback

SIZES = (1, 2, 4, 8, 16, 24, 32)


def name(size: int) -> object:
    return ("a graph of", size)


def test_the_exact_graph_or_the_next_larger_one_is_used() -> None:
    fallback = GraphFallback(SIZES)
    captured = {name(size) for size in (4, 16, 32)}
    assert [fallback.choose(size, name, captured) for size in SIZES] == [1, 4, 4, 16, 16, 32, 32]


def test_no_fallback_with_more_than_twice_the_rows() -> None:
    fallback = GraphFallback(SIZES)
    assert fallback.choose(8, name, {name(24), name(4)}) == 8
    assert fallback.choose(32, name, {name(24)}) == 32


def test_a_graph_missed_often_is_captured() -> None:
    fallback = GraphFallback(SIZES)
    captured = {name(16)}
    chosen = [fallback.choose(8, name, captured) for _ in range(graph_fallback.PATIENCE + 2)]
    assert chosen == [16] * graph_fallback.PATIENCE + [8, 8]
    captured.add(name(8))
    assert fallback.choose(8, name, captured) == 8
    assert fallback.choose(16, name, captured) == 16
