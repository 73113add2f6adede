"""Drafts are counted by drafter and by place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from millrace.engine.figures.draft_figures import DraftFigures
from millrace.run.drafting.drafted_rows import RowDrafts


def plan(places: list[int]) -> Any:
    return SimpleNamespace(draft_places=np.array(places, np.int32), samples=np.ones(len(places), np.bool_))


def test_a_cpu_says_who_drafted_what() -> None:
    figures = DraftFigures("suffix")
    drafted = (RowDrafts(1, "suffix", 3, 2), RowDrafts(2, "prediction", 2, 0))
    figures.on_step(plan([3, 3]), SimpleNamespace(num_drafts=np.array([3, 2]), drafted=drafted, counts=None))
    figures.on_step(plan([3, 3]), SimpleNamespace(num_drafts=np.array([0, 0]), drafted=(), counts=None))
    stats = figures.stats()
    assert stats["suffix"].proposed[:4] == (1, 1, 1, 0)
    assert stats["suffix"].accepted[:4] == (1, 1, 0, 0)
    assert stats["prediction"].proposed[:3] == (1, 1, 0)
    assert sum(stats["prediction"].accepted) == 0
    assert figures.num_steps == 1


def test_a_gpu_knows_places_and_tokens() -> None:
    figures = DraftFigures("ngram")
    counts = np.array([3, 1, 0], np.int32)
    figures.on_step(plan([3, 3, 3]), SimpleNamespace(num_drafts=None, drafted=(), counts=counts))
    stats = figures.stats()["ngram"]
    assert stats.proposed[:4] == (2, 2, 2, 0)
    assert stats.accepted[:4] == (1, 1, 0, 0)
