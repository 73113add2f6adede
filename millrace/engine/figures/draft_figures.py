"""What became of drafts, by drafter and by place in the chain of a step's drafts."""

from __future__ import annotations

import numpy as np

from millrace.link.messages import DraftStats
from millrace.plan.drafting.control import MAX_DRAFTS
from millrace.plan.step import Int64s, StepPlan
from millrace.run.runner import StepResult


class DraftFigures:
    def __init__(self, drafter: str) -> None:
        """`drafter`: who proposes where results do not say it, as on a GPU."""
        self._drafter = drafter
        self._counts: dict[str, Int64s] = {}
        """By drafter: int64 [2, MAX_DRAFTS], proposed and accepted."""
        self.num_steps = 0
        """Steps that verified drafts."""

    def on_step(self, plan: StepPlan, result: StepResult) -> None:
        if result.num_drafts is not None:
            for part in result.drafted:
                self._add(part.source, part.num_drafts, part.num_accepted)
            self.num_steps += bool(result.drafted)
        elif plan.draft_places is not None and result.counts is not None and plan.draft_places.any():
            self._add_places(plan, result.counts)

    def _add(self, drafter: str, num_drafts: int, num_accepted: int) -> None:
        counts = self._of(drafter)
        counts[0, :num_drafts] += 1
        counts[1, :num_accepted] += 1

    def _add_places(self, plan: StepPlan, tokens: np.ndarray) -> None:
        """Only the places are known: those without a draft count as proposed."""
        assert plan.draft_places is not None
        counts, place = self._of(self._drafter), np.arange(1, MAX_DRAFTS + 1)
        drawn = tokens > 0
        proposed, accepted = plan.draft_places[plan.samples][drawn], tokens[drawn] - 1
        counts[0] += (proposed[:, None] >= place).sum(axis=0)
        counts[1] += (accepted[:, None] >= place).sum(axis=0)
        self.num_steps += 1

    def _of(self, drafter: str) -> Int64s:
        return self._counts.setdefault(drafter, np.zeros((2, MAX_DRAFTS), np.int64))

    def stats(self) -> dict[str, DraftStats]:
        return {
            name: DraftStats(tuple(counts[0].tolist()), tuple(counts[1].tolist()))
            for name, counts in self._counts.items()
        }
