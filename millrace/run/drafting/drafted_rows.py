"""Steps with drafts on a CPU: makes a batch of a plan's rows and their drafts, and accepted tokens of drawn ones.

The device's own columns: all tokens of each row, and its limit. They are what the host's plan cannot know while steps
are in flight. A row's tokens become the table's host tokens, so that a step reads drafts where it reads a prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from millrace.plan.step import Bools, Int32s, Int64s, Masks, StepPlan, TrainedDrafts
from millrace.run.drafting.drafter import DraftAsk, DraftGuide, RowProgress, RowTokens
from millrace.run.drafting.drafters import GRAMMAR, Drafters
from millrace.run.sampling.penalties import NO_DRAFT
from millrace.run.table.batch import StepBatch, StepRows
from millrace.run.table.request_table import RequestTable

MAX_UNSETTLED = 64
"""Steps without drafts after which their tokens are taken over."""
_NO_TOKENS, _FIRST = np.zeros(0, np.int32), np.array([NO_DRAFT], np.int32)


@dataclass(frozen=True, slots=True)
class VerifiedStep:
    """What is computed for a plan: its rows with their drafts, those past their limit left out."""

    batch: StepRows
    """With the true starts, and counts that include drafts."""
    draws: Int32s
    """How many of each row's last tokens draw."""
    drawing: Int64s
    """Index, among the drawing rows of the plan, of each row here that draws."""
    num_drawing: int
    """Drawing rows of the plan."""
    drafts: tuple[Int32s, ...]
    """Of each drawing row of the plan."""
    is_as_planned: bool = False
    """True if no row has drafts or is past its limit, and all begin where the plan says: `batch` is the plan."""

    @property
    def has_drafts(self) -> bool:
        return bool(len(self.draws)) and int(self.draws.max()) > 1

    def drawing_rows(self) -> Int64s:
        """For each state to draw from: the index of its row among the drawing rows of the plan."""
        return np.repeat(self.drawing, self.draws[self.batch.samples])

    def places(self) -> Int64s:
        """For each state to draw from: its place among those of its row."""
        draws = self.draws[self.batch.samples]
        return np.arange(int(draws.sum())) - np.repeat(np.cumsum(draws) - draws, draws)

    def state_masks(self, masks: Masks) -> Masks:
        """Masks by drawing row of the plan and place, as masks by state to draw from."""
        draws = self.draws[self.batch.samples]
        state_of = np.full(self.num_drawing, -1, np.int64)
        state_of[self.drawing] = np.cumsum(draws) - draws
        states, is_kept = state_of[masks.index], state_of[masks.index] >= 0
        if masks.places is not None:
            states = states + masks.places
        return Masks(states[is_kept], masks.bits[is_kept])


@dataclass(frozen=True, slots=True)
class AcceptedStep:
    tokens: Int32s
    """Accepted tokens, row after row."""
    counts: Int32s
    """How many each drawing row of the plan has."""
    num_drafts: Int32s
    """Drafts that each of these rows had."""
    sources: Int32s
    """Where they came from: an index of `SOURCES`."""
    trained: TrainedDrafts | None
    """Those of a trained drafter, if there is one beside drafts from text."""


class DraftedRows:
    def __init__(self, table: RequestTable, max_rows: int, drafters: Drafters, guide: DraftGuide | None = None) -> None:
        """`guide`: shown the drafts of masked rows before they are verified."""
        self._table = table
        self.drafters = drafters
        self._guide = guide
        self._untold = np.zeros(max_rows, np.int64)
        """Tokens of each row that drafters were not told of: they are when they are asked for drafts."""
        self._unsettled: list[tuple[StepPlan, Int32s]] = []
        """Steps without drafts whose tokens are not in the table yet."""
        self.num_drafted = self.num_accepted = 0

    def needs_hidden(self, step: StepRows) -> bool:
        return self.drafters.needs_hidden(step.rows)

    def take_hidden(self, hidden: Tensor, rows: Int32s, positions: Int32s) -> None:
        self.drafters.take_hidden(hidden, rows, positions)

    def admit(self, plan: StepPlan) -> None:
        """Begin a step. Call it after the table is updated."""
        for admission in plan.admitted:
            self._untold[admission.row] = 0
            self.drafters.admit(admission)
        if plan.trained_rests:
            self.drafters.rest(plan.rows)
        if plan.appended:
            self._tell([appended.row for appended in plan.appended])

    def leave(self, plan: StepPlan) -> None:
        """Rows change hands. Call it before the table is updated. A row has blocks only for what was computed."""
        if not (plan.released or plan.admitted or plan.appended):
            return
        self._settle()
        table = self._table
        rows = [gone.row for gone in plan.released if table.request_ids[gone.row] == gone.request_id]
        if rows:
            self.drafters.leave([RowTokens(row, table.tokens[row][: table.computed[row]]) for row in rows])
        for release in plan.released:
            tokens = table.known_tokens(release.row)
            self.drafters.release(release.row, tokens, has_ended=release.reason != "preempted")
        for appended in plan.appended:
            self._untold[appended.row] += appended.start + len(appended.tokens) - table.known[appended.row]

    def _tell(self, rows: list[int]) -> None:
        """Tell drafters of the tokens that they have not heard of."""
        counts = [(row, int(self._untold[row])) for row in rows]
        progress = [RowProgress(row, self._table.known_tokens(row), new, 0, 0) for row, new in counts if new]
        if progress:
            self._untold[rows] = 0
            self.drafters.confirm(progress)

    def feed(self, batch: StepRows, draws: Int32s | Bools, states: Tensor | None = None) -> None:
        """The target's forward pass has computed the batch's tokens, with `states` if drafters need them. `draws`: how
        many of each row's tokens draw."""
        if not self.drafters.is_followed(batch.rows):
            return
        if states is not None:
            self.drafters.take_states(batch.rows, batch.starts, batch.counts, states)
        columns = zip(batch.rows.tolist(), batch.starts.tolist(), batch.counts.tolist(), draws.tolist(), strict=True)
        rows = []
        for row, start, count, num_draws in columns:
            is_prompt = num_draws != count
            self._table.computed[row] = end = start + (count if is_prompt else 1)
            rows.append(RowTokens(row, self._table.tokens[row][:end], is_prompt))
        self.drafters.feed(rows)

    def expand(self, plan: StepPlan, given: tuple[Int32s, ...] | None = None) -> VerifiedStep:
        """Propose drafts for the plan's places, and leave out rows that are past their limit. `given`: what another
        rank proposed, see `StepInputs.drafts`."""
        self._settle()
        table = self._table
        starts, counts, keeps = plan.starts.copy(), plan.counts.copy(), np.ones(len(plan.rows), np.bool_)
        draws = plan.samples.astype(np.int32)
        places = np.zeros(len(plan.rows), np.int32) if plan.draft_places is None else plan.draft_places
        indices, asks = [], []
        for index in np.flatnonzero(plan.samples & (plan.counts == 1)).tolist():
            row = int(plan.rows[index])
            known, limit = int(table.known[row]), int(table.limit[row])
            if known >= limit:
                keeps[index] = False
                continue
            starts[index] = known - 1
            max_drafts = min(int(places[index]), limit - known - 1)
            if max_drafts > 0:
                indices.append(index)
                asks.append(self._ask(plan, index, max_drafts))
        self._tell([ask.row for ask in asks])
        own, drawing_index = [_NO_TOKENS] * int(plan.samples.sum()), np.cumsum(plan.samples) - 1
        asked = drawing_index[indices].tolist() if indices else []
        if given is None:
            proposed = self._propose(plan, indices, asks)
        else:
            proposed = self.drafters.take(asks, [given[at] for at in asked] if given else [_NO_TOKENS] * len(asks))
        for index, at, ask, drafts in zip(indices, asked, asks, proposed, strict=True):
            own[at] = drafts
            known, num_drafts = len(ask.tokens), len(drafts)
            table.tokens[ask.row][known : known + num_drafts] = drafts
            counts[index] += num_drafts
            draws[index] += num_drafts
            self.num_drafted += num_drafts
        num_drawing = len(own)
        if plan.masked is None and keeps.all() and (counts == plan.counts).all() and (starts == plan.starts).all():
            return VerifiedStep(plan, draws, np.arange(num_drawing), num_drawing, (), True)
        table.num_admitted[plan.rows] = np.maximum(table.known[plan.rows], starts + counts)
        drawing = np.flatnonzero(keeps[plan.samples])
        batch = StepBatch(
            plan.rows[keeps],
            starts[keeps],
            counts[keeps],
            plan.samples[keeps],
            None if plan.scored is None else plan.scored[keeps],
            None if plan.pooled is None else plan.pooled[keeps],
        )
        return VerifiedStep(batch, draws[keeps], drawing, num_drawing, tuple(own))

    def _propose(self, plan: StepPlan, indices: list[int], asks: list[DraftAsk]) -> list[Int32s]:
        """Drafts for each row, as far as its grammar allows them."""
        proposed = self.drafters.propose(asks)
        if plan.masked is not None and self._guide is not None:
            for at, index in enumerate(indices):
                if plan.masked[index]:
                    proposed[at] = self._guided(self._guide, asks[at], proposed[at])
        return proposed

    def _ask(self, plan: StepPlan, index: int, max_drafts: int) -> DraftAsk:
        row, trained, table = int(plan.rows[index]), plan.trained, self._table
        ask = DraftAsk(row, table.known_tokens(row), int(table.num_prompt[row]), max_drafts, plan.draft_floor)
        if trained is None:
            return ask
        return replace(ask, max_trained=min(int(trained.places[index]), max_drafts), min_gain=trained.worth)

    def _guided(self, guide: DraftGuide, ask: DraftAsk, drafts: Int32s) -> Int32s:
        allowed, is_forced = guide.guide(int(self._table.request_ids[ask.row]), ask, drafts)
        if is_forced:
            self.drafters.claim(ask.row, GRAMMAR)
        return allowed

    def before(self, step: VerifiedStep) -> Int32s:
        """For each state to draw from: the draft before it, or NO_DRAFT for a row's first. Call it before `accept`."""
        parts = []
        draws = step.draws[step.batch.samples].tolist()
        for row, num_draws in zip(step.batch.rows[step.batch.samples].tolist(), draws, strict=True):
            known = int(self._table.known[row])
            parts += [_FIRST, self._table.tokens[row][known : known + num_draws - 1]]
        return np.concatenate(parts) if parts else _NO_TOKENS

    def accept(self, plan: StepPlan, step: VerifiedStep, drawn: Int32s) -> AcceptedStep:
        """`step`: what was computed for the plan. `drawn`: a token for each of its draws."""
        counts, num_drafts, sources, num_trained = np.zeros((4, step.num_drawing), np.int32)
        table = self._table
        accepted: list[Int32s] = []
        progress: list[RowProgress] = []
        first = 0
        rows = step.batch.rows[step.batch.samples].tolist()
        draws = step.draws[step.batch.samples].tolist()
        for place, row, num_draws in zip(step.drawing.tolist(), rows, draws, strict=True):
            own = drawn[first : first + num_draws]
            first += num_draws
            known = int(table.known[row])
            # A draft is right if it is the token drawn before it.
            wrong = np.flatnonzero(own[:-1] != table.tokens[row][known : known + num_draws - 1])
            count = int(wrong[0]) + 1 if len(wrong) else num_draws
            table.append(row, known, own[:count])
            table.computed[row] = known + count - 1
            table.last_tokens[row] = int(own[count - 1])
            table.num_admitted[row] = known + count - 1  # The step after reads the row's last token.
            counts[place], num_drafts[place] = count, num_draws - 1
            if num_draws > 1:
                sources[place] = self.drafters.source_of(row)
                num_trained[place] = num_draws - 1 if self.drafters.is_trained(row) else 0
            accepted.append(own[:count])
            progress.append(self._progress(row, count, num_draws - 1))
        self.drafters.confirm(progress)
        tokens = np.concatenate(accepted) if accepted else drawn[:0]
        return AcceptedStep(tokens, counts, num_drafts, sources, self.trained_of(plan, num_trained))

    def trained_of(self, plan: StepPlan, num_drafts: Int32s) -> TrainedDrafts | None:
        """What a trained drafter did beside drafts from text, if there is one. `num_drafts`: its own."""
        return None if plan.trained is None else TrainedDrafts(num_drafts, self.drafters.trained_s)

    def _progress(self, row: int, num_new: int, num_drafts: int) -> RowProgress:
        """What drafters are told."""
        tokens, num_accepted = self._table.known_tokens(row), num_new - 1 if num_drafts else 0
        self.num_accepted += num_accepted
        num_untold, self._untold[row] = int(self._untold[row]), 0  # none if it has drafts
        return RowProgress(row, tokens, num_untold + num_new, num_drafts, num_accepted)

    def append(self, plan: StepPlan, drawn: Int32s) -> None:
        """The plan's step drew these tokens without drafts, one for each row that draws."""
        self._unsettled.append((plan, drawn))
        if len(self._unsettled) >= MAX_UNSETTLED or self.drafters.is_followed(plan.rows):
            self._settle()

    def _settle(self) -> None:
        """Take over the tokens of steps without drafts. Many at once cost much less than one after each step, when the
        step has displaced everything from the caches."""
        for plan, drawn in self._unsettled:
            rows = plan.rows[plan.samples]
            self._table.append_each(rows, drawn)
            self._untold[rows] += 1
            if self.drafters.is_followed(rows):
                self._tell(rows.tolist())
        self._unsettled.clear()
