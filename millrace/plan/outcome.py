"""What a step gave: which request gets which tokens, which requests end, and how far each row got.

Without drafts, which requests get a token, for which it is the first, and which reach their limit does not depend on
the token. This pending outcome is computed while the device runs the step, so tokens are sent sooner once they are
there. With drafts a row gets one token or several, and everything is computed when they arrive.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from millrace.plan.request import Request, end_of
from millrace.plan.rows.rows import Rows
from millrace.plan.step import NO_EPOCH, ONE, Bools, Ended, Int32s, Int64s, StepPlan


@dataclass(slots=True)
class Delivered:
    """What a confirmed step delivers, as columns over its tokens, and the rows' progress to be stored."""

    request_ids: Int64s
    tokens: Int32s
    sample_index: Int64s
    """Index of each token's row among the step's sampling rows."""
    first_ids: Int64s
    ended: list[tuple[int, Ended]]
    """Rows that ended, with their terminal events."""

    def end_silent(self, plan: StepPlan, rows: Rows) -> None:
        """End the rows that draw nothing and whose prompt is computed."""
        is_whole = plan.starts + plan.counts >= rows.num_prompt[plan.rows]
        for row in plan.rows[rows.silent[plan.rows] & is_whole & rows.active[plan.rows]].tolist():
            request = rows.request(row)
            self.first_ids = np.append(self.first_ids, request.id)
            self.ended.append((row, end_of(request, "stop", 0)))

    def insert_appended(self, rows: Rows) -> list[tuple[int, Int32s]]:
        """Add the tokens appended after those that this step drew. Returns them, by row."""
        inserted = []
        for row, tokens in list(rows.appended.items()):
            at = np.flatnonzero(self.request_ids == rows.request_ids[row])
            if not len(at):
                continue  # A later step draws the token before them.
            inserted.append((row, rows.appended.pop(row)))
            after = np.full(len(tokens), at[-1] + 1)
            self.request_ids = np.insert(self.request_ids, after, rows.request_ids[row])
            self.tokens = np.insert(self.tokens, after, tokens)
            self.sample_index = np.insert(self.sample_index, after, self.sample_index[at[-1]])
        return inserted


@dataclass(slots=True)  # Never modified, but a frozen dataclass takes several times as long to create.
class PendingOutcome:
    """Valid until a row is released. Columns are over the sampling rows that are still active, unless noted."""

    computed_rows: Int64s
    """All rows of the step that are still active."""
    computed: Int32s
    """Tokens of each of `computed_rows` that will have been computed."""
    sample_index: Int64s
    """Index of each row among all sampling rows of the step."""
    all_active: bool
    """True if every row of the step is still active."""
    table_rows: Int64s
    request_ids: Int64s
    first_ids: Int64s
    """Requests that get their first token."""
    positions: Int32s
    """Positions of the new tokens."""
    is_last: Bools
    """True where the new token is the last that the request's limit allows."""
    length_ends: dict[int, Ended]
    """Terminal events of the `is_last` rows, by column; used unless the token is an end token."""
    end_tokens: Int32s | None
    """[max end tokens per row, rows]: end tokens in effect for each row; None if no active row has any."""
    steps_left: int
    """Steps of the same rows after this one until the first row reaches its limit."""
    hides_ends: bool
    """True if some row ignores its end tokens because it is still below min_tokens."""
    epoch: int = NO_EPOCH
    """Of the plan."""
    is_repeated: bool = False
    """True if derived by `next` from the outcome of the previous step."""

    @property
    def can_repeat(self) -> bool:
        """True if the outcome of a repeated decode step is this one with positions advanced by one."""
        return self.all_active and self.steps_left > 1 and not self.hides_ends

    def next(self, count: int = 1) -> PendingOutcome:
        """The outcome of the repeated decode step that follows, or of a later one."""
        further = ONE if count == 1 else np.int32(count)
        return PendingOutcome(
            computed_rows=self.computed_rows,
            computed=self.computed + further,
            sample_index=self.sample_index,
            all_active=True,
            table_rows=self.table_rows,
            request_ids=self.request_ids,
            first_ids=self.first_ids[:0],
            positions=self.positions + further,
            is_last=self.is_last,
            length_ends={},
            end_tokens=self.end_tokens,
            steps_left=self.steps_left - count,
            hides_ends=False,
            epoch=self.epoch,
            is_repeated=True,
        )

    def deliver(self, rows: Rows, drawn: Int32s) -> Delivered:
        """The step's outcome, now that its tokens are known. `drawn`: those of the rows that are still active."""
        stopped = self._stopped(drawn)
        ended = self._ends(rows, drawn, stopped)
        ids, index = self.request_ids, self.sample_index
        if stopped is not None:  # An end token is not part of the answer.
            delivered = ~stopped
            ids, drawn, index = ids[delivered], drawn[delivered], index[delivered]
        return Delivered(ids, drawn, index, self.first_ids, ended)

    def store(self, rows: Rows, drawn: Int32s) -> None:
        """Count the step's progress as confirmed and keep its tokens."""
        rows.confirmed[self.computed_rows] = self.computed
        rows.append(self.table_rows, self.positions, drawn)

    def active_tokens(self, tokens: Int32s) -> Int32s:
        """The tokens of rows that are still active, of all that the step drew."""
        return tokens if self.all_active else tokens[self.sample_index]

    def _stopped(self, drawn: Int32s) -> Bools | None:
        """Which rows drew an end token; None if none did."""
        if self.end_tokens is None:
            return None
        is_end = self.end_tokens == drawn
        if not np.count_nonzero(is_end):  # In a third of the time of `any`.
            return None
        stopped: Bools = is_end.any(axis=0)
        return stopped

    def _ends(self, rows: Rows, drawn: Int32s, stopped: Bools | None) -> list[tuple[int, Ended]]:
        """Rows that ended, with their terminal events, in the order of the step."""
        if stopped is None:
            return [(int(self.table_rows[at]), ended) for at, ended in self.length_ends.items()]
        ends = []
        for at in (stopped | self.is_last).nonzero()[0].tolist():
            row = int(self.table_rows[at])
            if stopped[at]:
                num_output = int(self.positions[at]) + 1 - rows.request(row).num_prompt
                ends.append((row, end_of(rows.request(row), "stop", num_output, stop_token_id=int(drawn[at]))))
            else:
                ends.append((row, self.length_ends[at]))
        return ends


def make_pending_outcome(plan: StepPlan, rows: Rows) -> PendingOutcome:
    computed_rows = table_rows = plan.rows.astype(np.int64)  # The index type: converted once for all uses below.
    is_active, computed = rows.active[computed_rows], plan.starts + plan.counts
    all_active = bool(is_active.all())
    if not plan.samples.all():
        table_rows = table_rows[plan.samples]
    sample_index = np.arange(len(table_rows))
    if not all_active:
        computed_rows, computed = computed_rows[is_active], computed[is_active]
        sample_index = rows.active[table_rows].nonzero()[0]
        table_rows = table_rows[sample_index]
    positions, request_ids = rows.known_host[table_rows], rows.request_ids[table_rows]
    left = rows.limit[table_rows] - positions - 1
    is_last = left <= 0
    end_tokens, hides_ends = rows.end_tokens.in_effect(table_rows, positions)
    return PendingOutcome(
        computed_rows=computed_rows,
        computed=computed,
        sample_index=sample_index,
        all_active=all_active,
        table_rows=table_rows,
        request_ids=request_ids,
        first_ids=request_ids[positions == rows.num_prompt[table_rows]],
        positions=positions,
        is_last=is_last,
        length_ends=_length_ends(rows, table_rows, positions, is_last),
        end_tokens=end_tokens,
        steps_left=int(left.min()) if len(left) else 0,
        hides_ends=hides_ends,
        epoch=plan.epoch,
    )


def _length_ends(rows: Rows, table_rows: Int64s, positions: Int32s, is_last: Bools) -> dict[int, Ended]:
    ends = {}
    for at in is_last.nonzero()[0].tolist():
        request = rows.request(int(table_rows[at]))
        ends[at] = end_of(request, "length", int(positions[at]) + 1 - request.num_prompt)
    return ends


class DraftedOutcome:
    """The outcome of a step that verified drafts. Columns are over its sampling rows that are still active."""

    is_repeated = False
    can_repeat = False

    def __init__(self, plan: StepPlan, rows: Rows, counts: Int32s) -> None:
        """`counts`: tokens of each sampling row of the plan, those drawn past an end token or for a released row
        included."""
        if plan.draft_places is None:
            raise AssertionError("a step without draft places has one token per row")
        all_rows = plan.rows.astype(np.int64)
        is_active = rows.active[all_rows]
        self.computed_rows = all_rows[is_active]
        drawing = np.flatnonzero(plan.samples & is_active)
        self.table_rows = all_rows[drawing]
        self._places = plan.draft_places[drawing]
        self._index = np.cumsum(plan.samples)[drawing] - 1
        """Index of each row among the sampling rows."""
        self._counts = counts[self._index]
        self._first = (np.cumsum(counts) - counts)[self._index]
        """Index of each row's first token among all that the step drew."""
        silent = is_active & ~plan.samples
        self._silent_rows, self._silent_ends = all_rows[silent], (plan.starts + plan.counts)[silent]
        """Rows that did not draw, and the tokens computed of each."""

    def deliver(self, rows: Rows, tokens: Int32s) -> Delivered:
        """`tokens`: all that the step drew."""
        ids: list[int] = []
        index: list[int] = []
        places: list[int] = []
        first_ids, ended = [], []
        listed = zip(self.table_rows.tolist(), self._first.tolist(), self._counts.tolist(), strict=True)
        for at, (row, first, count) in enumerate(listed):
            request, known = rows.request(row), int(rows.known_host[row])
            if count < 1 or known + count > request.limit:
                raise AssertionError(f"row {row} drew {count} tokens after {known}; its limit is {request.limit}")
            if known == request.num_prompt:
                first_ids.append(request.id)
            kept, event = _cut(request, known, tokens[first : first + count])
            if event is not None:
                ended.append((row, event))
                self._counts[at] = event.num_output + request.num_prompt - known
            ids += [request.id] * kept
            index += [int(self._index[at])] * kept
            places += range(first, first + kept)
        columns = (np.array(values, np.int64) for values in (ids, places, index, first_ids))
        request_ids, at_places, sample_index, firsts = columns
        return Delivered(request_ids, tokens[at_places], sample_index, firsts, ended)

    def store(self, rows: Rows, tokens: Int32s) -> None:
        """Count the step's progress as confirmed, keep its tokens, and correct what was planned on the least."""
        rows.confirmed[self._silent_rows] = self._silent_ends
        table_rows, counts = self.table_rows, self._counts
        known = rows.known_host[table_rows]
        for place in range(int(counts.max()) if len(counts) else 0):
            has = counts > place
            rows.append(table_rows[has], known[has] + place, tokens[self._first[has] + place])
        rows.confirmed[table_rows] = known + counts - 1
        rows.known[table_rows] += counts - 1
        rows.computed[table_rows] += counts - 1
        rows.slack[table_rows] -= self._places


def _cut(request: Request, known: int, tokens: Int32s) -> tuple[int, Ended | None]:
    """How many of a row's new tokens belong to the answer, and its terminal event if it ends."""
    ends_from = request.num_prompt + request.min_tokens
    for at, token in enumerate(tokens.tolist()):
        if token in request.end_token_ids and known + at >= ends_from:
            num_output = known + at + 1 - request.num_prompt
            return at, end_of(request, "stop", num_output, stop_token_id=token)
    if known + len(tokens) >= request.limit:
        return len(tokens), end_of(request, "length", request.max_tokens)
    return len(tokens), None
