"""Drafts are counted by drafter and by place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from millrace.engine.figures.draft_figures import DraftFigures
from millrace.engine.figures.row_drafts import FORCED, RowDraftCounts, StepDrafts, step_drafts
from millrace.ops.base.draft_sources import PREDICTED
from millrace.plan.step import ForcedDrafts
from millrace.run.drafting.drafters import PREDICTION, SOURCES

SUFFIX = SOURCES.index("suffix")
assert SOURCES[PREDICTED] == PREDICTION


def plan(places: list[int]) -> Any:
    return SimpleNamespace(
        draft_places=np.array(places, np.int32),
        samples=np.ones(len(places), np.bool_),
        rows=np.arange(3, 3 + len(places), dtype=np.int32),
        forced=(),
    )


def columns_of(**columns: list[int]) -> Any:
    return SimpleNamespace(**{name: np.array(own, np.int32) for name, own in columns.items()})


def test_a_cpu_says_who_drafted_what() -> None:
    figures = DraftFigures("suffix")
    figures.on_step(plan([3, 3]), columns_of(counts=[3, 1], num_drafts=[3, 2], sources=[SUFFIX, PREDICTED]))
    figures.on_step(plan([3, 3]), columns_of(counts=[1, 1], num_drafts=[0, 0], sources=[0, 0]))
    stats = figures.stats()
    assert stats["suffix"].proposed[:4] == (1, 1, 1, 0)
    assert stats["suffix"].accepted[:4] == (1, 1, 0, 0)
    assert stats["prediction"].proposed[:3] == (1, 1, 0)
    assert sum(stats["prediction"].accepted) == 0
    assert figures.num_steps == 1


def test_a_gpu_says_it_in_columns_and_counts_no_empty_places() -> None:
    figures, rows = DraftFigures("ngram"), RowDraftCounts(8, "ngram")
    step = plan([3, 3, 3, 3, 3])
    step.forced = (ForcedDrafts(6, np.array([1, 2], np.int32)),)
    columns = {"counts": [3, 1, 0, 3, 2], "num_drafts": [3, 0, 0, 2, 2], "sources": [0, 1, 0, 1, 1]}
    result = columns_of(**columns)
    figures.on_step(step, result)
    stats = figures.stats()
    assert {name: own.proposed[:4] for name, own in stats.items()} == {
        "ngram": (1, 1, 1, 0),
        "prediction": (1, 1, 0, 0),
        "grammar": (1, 1, 0, 0),
    }
    assert {name: sum(own.accepted) for name, own in stats.items()} == {"ngram": 2, "prediction": 1, "grammar": 2}
    assert figures.num_steps == 1
    for row, request_id in ((3, 30), (5, 50), (6, 60), (7, 70)):
        rows.admit(row, request_id)
    drafted = step_drafts(step, result)
    assert drafted is not None
    rows.add(drafted)
    rows.add(drafted)
    assert rows.take(30) == {"ngram": (2, 6, 4)}
    assert rows.take(30) == rows.take(50) == rows.take(99) == {}
    assert rows.take(60) == {"grammar": (2, 4, 4)}
    assert rows.admit(7, 71) == (70, {"prediction": (2, 4, 2)}), "of a preempted request"
    assert rows.take(70) == rows.take(71) == {}
    rows.add(drafted)
    rows.admit(0, 60)  # preempted, it got another row before anybody got its first one
    rows.add(StepDrafts(np.array([0]), np.array([FORCED], np.int32), *np.array([[3], [1]], np.int32)))
    assert rows.take(60) == {"grammar": (2, 5, 3)}
    result.num_drafts[:] = 0
    assert step_drafts(step, result) is None
