"""Steps with drafts on a CPU: turns the places of a plan into tokens to verify, and drawn tokens into accepted ones.

The device's own columns: all tokens of each row, and its limit. They are what the host's plan cannot know while steps
are in flight. A row's tokens become the table's host tokens, so that a step reads drafts where it reads a prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from millrace.plan.step import Int32s, Int64s, StepPlan
from millrace.run.drafting.ngram import propose_ngram
from millrace.run.drafting.prediction import propose_predicted
from millrace.run.sampling.masks import Masks
from millrace.run.sampling.penalties import NO_DRAFT
from millrace.run.table.request_table import RequestTable

_NO_TOKENS, _FIRST = np.zeros(0, np.int32), np.array([NO_DRAFT], np.int32)
Propose = Callable[[Int32s, int], Int32s]
"""(all tokens of a row, maximum number) -> drafts"""


@dataclass(frozen=True, slots=True)
class VerifiedStep:
    """What is computed for a plan: its rows with their drafts, those past their limit left out."""

    plan: StepPlan
    """With the true starts, and counts that include drafts."""
    draws: Int32s
    """How many of each row's last tokens draw."""
    drawing: Int64s
    """Index, among the drawing rows of the original plan, of each row here that draws."""
    num_drawing: int
    """Drawing rows of the original plan."""

    def drawing_rows(self) -> Int64s:
        """For each state to draw from: the index of its row among the drawing rows of the original plan."""
        return np.repeat(self.drawing, self.draws[self.plan.samples])

    def places(self) -> Int64s:
        """For each state to draw from: its place among those of its row."""
        draws = self.draws[self.plan.samples]
        return np.arange(int(draws.sum())) - np.repeat(np.cumsum(draws) - draws, draws)

    def state_masks(self, masks: Masks) -> Masks:
        """Masks by drawing row of the original plan, as masks by state to draw from. Masked rows have no drafts."""
        draws = self.draws[self.plan.samples]
        state_of = np.full(self.num_drawing, -1, np.int64)
        state_of[self.drawing] = np.cumsum(draws) - draws
        states = state_of[masks.index]
        return Masks(states[states >= 0], masks.bits[states >= 0])


@dataclass(frozen=True, slots=True)
class PredictedDrafts:
    """Drafts of one request in one step that come from its prediction."""

    request_id: int
    num_drafts: int
    num_accepted: int


class DraftedRows:
    def __init__(self, table: RequestTable, max_rows: int, propose: Propose = propose_ngram) -> None:
        self._table, self._propose = table, propose
        self._tokens: list[Int32s] = [np.zeros(0, np.int32)] * max_rows
        """Room for all tokens up to the limit, and the drafts of a step."""
        self._known = np.zeros(max_rows, np.int64)
        self._limit = np.zeros(max_rows, np.int64)
        self.num_drafted = self.num_accepted = 0
        self._predictions: dict[int, Int32s] = {}
        """By row: what its client expects the answer to contain."""
        self._predicted: dict[int, int] = {}
        """By row: drafts of the current step that come from its prediction."""

    def admit(self, plan: StepPlan) -> None:
        for admission in plan.admitted:
            row, known = admission.row, len(admission.tokens)
            self._tokens[row] = tokens = np.zeros(max(admission.limit, known + 1), np.int32)
            tokens[:known] = admission.tokens
            self._known[row], self._limit[row] = known, admission.limit
            self._table.tokens[row] = tokens
            self._predictions.pop(row, None)
            if prediction := admission.row_params.params.prediction:
                self._predictions[row] = np.array(prediction, np.int32)
        for appended in plan.appended:
            row, end = appended.row, appended.start + len(appended.tokens)
            self._tokens[row][appended.start : end] = appended.tokens
            self._known[row] = end

    def expand(self, plan: StepPlan) -> VerifiedStep:
        """Propose drafts for the plan's places, and leave out rows that are past their limit."""
        self._predicted.clear()
        starts, counts, keeps = plan.starts.copy(), plan.counts.copy(), np.ones(len(plan.rows), np.bool_)
        draws = plan.samples.astype(np.int32)
        places = np.zeros(len(plan.rows), np.int32) if plan.draft_places is None else plan.draft_places
        for index in np.flatnonzero(plan.samples & (plan.counts == 1)).tolist():
            row = int(plan.rows[index])
            known, limit = int(self._known[row]), int(self._limit[row])
            if known >= limit:
                keeps[index] = False
                continue
            drafts = self._drafts(row, min(int(places[index]), limit - known - 1))
            starts[index], counts[index] = known - 1, 1 + drafts
            draws[index] += drafts
        self._table.num_admitted[plan.rows] = np.maximum(self._known[plan.rows], starts + counts)
        drawing = np.flatnonzero(keeps[plan.samples])
        true_plan = replace(
            plan, rows=plan.rows[keeps], starts=starts[keeps], counts=counts[keeps], samples=plan.samples[keeps]
        )
        return VerifiedStep(true_plan, draws[keeps], drawing, int(plan.samples.sum()))

    def _drafts(self, row: int, max_drafts: int) -> int:
        """Write the row's drafts after its tokens; returns how many there are."""
        if max_drafts <= 0:
            return 0
        tokens, known, prediction = self._tokens[row], int(self._known[row]), self._predictions.get(row)
        drafts = _NO_TOKENS
        if prediction is not None:
            drafts = propose_predicted(prediction, tokens[self._table.num_prompt[row] : known], max_drafts)
            self._predicted[row] = len(drafts)
        if not len(drafts):
            drafts = self._propose(tokens[:known], max_drafts)
        tokens[known : known + len(drafts)] = drafts
        self.num_drafted += len(drafts)
        return len(drafts)

    def predicted(self, step: VerifiedStep, counts: Int32s) -> tuple[PredictedDrafts, ...]:
        """What became of the drafts from predictions. `counts`: as `accept` returned them."""
        if not any(self._predicted.values()):
            return ()
        count_of = dict(zip(step.plan.rows[step.plan.samples].tolist(), counts[step.drawing].tolist(), strict=True))
        return tuple(
            PredictedDrafts(int(self._table.request_ids[row]), num_drafts, count_of[row] - 1)
            for row, num_drafts in self._predicted.items()
            if num_drafts
        )

    def before(self, step: VerifiedStep) -> Int32s:
        """For each state to draw from: the draft before it, or NO_DRAFT for a row's first. Call it before `accept`."""
        parts = []
        draws = step.draws[step.plan.samples].tolist()
        for row, num_draws in zip(step.plan.rows[step.plan.samples].tolist(), draws, strict=True):
            known = int(self._known[row])
            parts += [_FIRST, self._tokens[row][known : known + num_draws - 1]]
        return np.concatenate(parts) if parts else _NO_TOKENS

    def accept(self, step: VerifiedStep, drawn: Int32s) -> tuple[Int32s, Int32s]:
        """`drawn`: a token for each draw of the step. Returns the accepted tokens and how many each drawing row of the
        original plan has."""
        counts = np.zeros(step.num_drawing, np.int32)
        accepted: list[Int32s] = []
        first = 0
        rows = step.plan.rows[step.plan.samples].tolist()
        draws = step.draws[step.plan.samples].tolist()
        for place, row, num_draws in zip(step.drawing.tolist(), rows, draws, strict=True):
            own = drawn[first : first + num_draws]
            first += num_draws
            tokens, known = self._tokens[row], int(self._known[row])
            # A draft is right if it is the token drawn before it.
            wrong = np.flatnonzero(own[:-1] != tokens[known : known + num_draws - 1])
            count = int(wrong[0]) + 1 if len(wrong) else num_draws
            tokens[known : known + count] = own[:count]
            self._known[row] = known + count
            self._table.last_tokens[row] = int(own[count - 1])
            self.num_accepted += count - 1
            counts[place] = count
            accepted.append(own[:count])
        return np.concatenate(accepted) if accepted else drawn[:0], counts
