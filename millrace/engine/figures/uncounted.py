"""An engine without figures (`--no-figures`): the same collaborators, which count only what a report needs."""

from __future__ import annotations

import math

from millrace.engine.cycle import Confirmed
from millrace.engine.figures.step_figures import StepFigures
from millrace.link.messages import Finish
from millrace.observe.histograms import Histograms


class UncountedSteps(StepFigures):
    def last_token_at(self, row: int) -> float:
        return math.nan

    def on_admitted(self, row: int, last_token: float, adapter: str = "") -> None:
        pass

    def on_step(self, done: Confirmed) -> None:
        self.output_tokens += len(done.outcome.tokens)


class UncountedTimes(Histograms):
    def observe(self, kind: int, priority: int, value: float) -> None:
        pass

    def observe_finish(self, finish: Finish, priority: int, before_submit_s: float) -> None:
        pass
