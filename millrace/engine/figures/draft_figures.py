"""What became of drafts, by drafter and by place in the chain of a step's drafts."""

from __future__ import annotations

import numpy as np

from millrace.engine.figures.row_drafts import StepDrafts, source_names, step_drafts
from millrace.link.engine_stats import DraftStats
from millrace.plan.drafting.control import MAX_DRAFTS
from millrace.plan.step import Int64s, StepPlan
from millrace.run.protocol import StepResult


class DraftFigures:
    def __init__(self, drafter: str) -> None:
        """`drafter`: the engine's own."""
        self._names = source_names(drafter)
        self._counts: dict[str, Int64s] = {}
        """By drafter: int64 [2, MAX_DRAFTS], proposed and accepted."""
        self.num_steps = 0
        """Steps that verified drafts."""

    def on_step(self, plan: StepPlan, result: StepResult) -> None:
        drafted = step_drafts(plan, result)
        if drafted is not None:
            self._add_rows(drafted)
            self.num_steps += 1

    def _add_rows(self, drafted: StepDrafts) -> None:
        place = np.arange(1, MAX_DRAFTS + 1)
        for source in np.unique(drafted.sources).tolist():
            counts, own = self._of(self._names[source]), drafted.sources == source
            counts[0] += (drafted.num_drafts[own, None] >= place).sum(axis=0)
            counts[1] += (drafted.num_accepted[own, None] >= place).sum(axis=0)

    def _of(self, drafter: str) -> Int64s:
        return self._counts.setdefault(drafter, np.zeros((2, MAX_DRAFTS), np.int64))

    def stats(self) -> dict[str, DraftStats]:
        return {
            name: DraftStats(tuple(counts[0].tolist()), tuple(counts[1].tolist()))
            for name, counts in self._counts.items()
        }
