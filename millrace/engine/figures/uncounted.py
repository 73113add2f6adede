"""An engine without figures (`--no-figures`): the same collaborators, which count only what a report needs."""

from __future__ import annotations

import numpy.typing as npt
from numpy import int32

from millrace.engine.cycle import Confirmed
from millrace.engine.figures.step_figures import StepFigures
from millrace.engine.figures.step_log import StepLog
from millrace.link.messages import Finish
from millrace.observe.histograms import Floats, Histograms
from millrace.plan.step import StepOutcome, StepPlan


class UncountedSteps(StepFigures):
    def on_step(
        self, plan: StepPlan, outcome: StepOutcome, now: float, num_drafts: npt.NDArray[int32] | None = None
    ) -> None:
        self.output_tokens += len(outcome.tokens)


class UnloggedSteps(StepLog):
    def note(self, done: Confirmed, figures: StepFigures) -> None:
        pass


class UncountedTimes(Histograms):
    def observe(self, kind: int, priority: int, value: float) -> None:
        pass

    def observe_finish(self, finish: Finish, priority: int, before_submit_s: float) -> None:
        pass

    def observe_gaps(self, gaps: Floats, priorities: npt.NDArray[int32]) -> None:
        pass
