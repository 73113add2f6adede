"""What is chosen by graphs follows from the plans, not from what a rank could capture."""

from __future__ import annotations

import pytest
import torch

from millrace.run.graphs.graph_cache import Captured, GraphCache, Work

SIZES = (1, 2, 4, 8, 16)


def cache_of(monkeypatch: pytest.MonkeyPatch, *, captures: bool) -> GraphCache:
    cache = GraphCache(SIZES, enabled=False)
    cache.has_graphs = cache.is_capturing = True

    def capture(key: object, work: Work) -> Captured | None:
        cache.is_capturing = captures
        return None

    monkeypatch.setattr(cache, "capture", capture)
    return cache


def test_a_rank_that_cannot_capture_chooses_the_same_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    for captures in (True, False):
        cache, chosen = cache_of(monkeypatch, captures=captures), list[int]()
        cache.expect(16)
        for size in (8, 8, 4, 4, 4, 2):
            chosen.append(cache.choose_size(size, lambda size: size))
            cache.run(chosen[-1], lambda: torch.zeros(0))
        assert chosen == [16, 16, 4, 4, 4, 4], "4 is captured the second time, and then serves 2 rows too"
        assert cache.is_capturing == captures
