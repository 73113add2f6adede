"""Plans say what runs and what is captured: a rank that cannot capture runs the same work uncaptured."""

from __future__ import annotations

import pytest
import torch

from millrace.run.graphs.graph_cache import Captured, GraphCache, Work


class FakeGraph:
    def __init__(self, work: Work) -> None:
        self.replay = work


@pytest.mark.parametrize("can_capture", [True, False])
def test_a_rank_that_cannot_capture_runs_what_the_others_run(
    can_capture: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, ran = GraphCache(enabled=False), list[str]()
    cache.is_capturing = True

    def capture(key: object, work: Work) -> Captured | None:
        cache.is_capturing = can_capture
        if can_capture:
            cache.captured[key] = Captured(FakeGraph(work), torch.zeros(1))  # type: ignore[arg-type]
        return cache.captured.get(key)

    def work(name: str) -> Work:
        return lambda: (ran.append(name), torch.zeros(1))[1]

    monkeypatch.setattr(cache, "capture", capture)
    for key, captures in (("head of 4", False), ("head of 4", True), ("head of 4", False), ("head of 8", False)):
        assert len(cache.run(key, work(key), captures=captures)) == 1
    assert ran == ["head of 4"] * 3 + ["head of 8"]
    assert set(cache.captured) == ({"head of 4"} if can_capture else set())
