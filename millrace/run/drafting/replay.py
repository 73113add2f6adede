"""Replayed drafts, for benchmarks: draft i of an answer is token i of the request's prediction.

A prediction recorded from an earlier run, with each token spoilt with probability 1 - p, makes every draft right with
probability p given that those before it were: a token is tested once, by the step that reaches it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from millrace.plan.step import Admission, Int32s
from millrace.run.drafting.drafter import DraftAsk, Drafter


class ReplayDrafter(Drafter):
    def __init__(self) -> None:
        self._recorded: dict[int, Int32s] = {}
        """By row."""

    def admit(self, admission: Admission) -> None:
        self._recorded[admission.row] = np.array(admission.row_params.params.prediction, np.int32)

    def propose(self, asks: Sequence[DraftAsk]) -> list[Int32s]:
        return [self._recorded[ask.row][len(ask.tokens) - ask.num_prompt :][: ask.max_drafts] for ask in asks]
