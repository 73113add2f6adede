"""The pending outcome: what is known of a launched step before its tokens arrive.

Which requests get a token, for which it is the first, and which reach their limit does not depend on the token itself.
It is computed while the device runs the step, so tokens are sent sooner once they are there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from millrace.plan.request import end_of
from millrace.plan.rows import NO_TOKEN, Rows
from millrace.plan.step import Bools, Ended, Int32s, Int64s, StepPlan


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
    is_repeated: bool = False
    """True if derived by `next` from the outcome of the previous step."""

    @property
    def can_repeat(self) -> bool:
        """True if the outcome of a repeated decode step is this one with positions advanced by one."""
        return self.all_active and self.steps_left > 1 and not self.hides_ends

    def next(self) -> PendingOutcome:
        """The outcome of the repeated decode step that follows."""
        return PendingOutcome(
            computed_rows=self.computed_rows,
            computed=self.computed + 1,
            sample_index=self.sample_index,
            all_active=True,
            table_rows=self.table_rows,
            request_ids=self.request_ids,
            first_ids=self.first_ids[:0],
            positions=self.positions + 1,
            is_last=self.is_last,
            length_ends={},
            end_tokens=self.end_tokens,
            steps_left=self.steps_left - 1,
            hides_ends=False,
            is_repeated=True,
        )

    def active_tokens(self, tokens: Int32s) -> Int32s:
        """The tokens of rows that are still active, of all that the step drew."""
        return tokens if self.all_active else tokens[self.sample_index]

    def stopped(self, drawn: Int32s) -> Bools | None:
        """Which rows drew an end token; None if none did."""
        if self.end_tokens is None:
            return None
        is_end = self.end_tokens == drawn
        if not is_end.any():
            return None
        stopped: Bools = is_end.any(axis=0)
        return stopped

    def ends(self, rows: Rows, drawn: Int32s, stopped: Bools | None) -> list[tuple[int, Ended]]:
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
    end_tokens, hides_ends = _end_tokens(rows, table_rows, positions) if rows.num_with_ends else (None, False)
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
    )


def _length_ends(rows: Rows, table_rows: Int64s, positions: Int32s, is_last: Bools) -> dict[int, Ended]:
    ends = {}
    for at in is_last.nonzero()[0].tolist():
        request = rows.request(int(table_rows[at]))
        ends[at] = end_of(request, "length", int(positions[at]) + 1 - request.num_prompt)
    return ends


def _end_tokens(rows: Rows, table_rows: Int64s, positions: Int32s) -> tuple[Int32s, bool]:
    """The columns `end_tokens` and `hides_ends` of the outcome."""
    end_tokens: Int32s = rows.end_tokens[table_rows]
    too_early = positions < rows.ends_from[table_rows]
    hides = bool(too_early.any())
    if hides:
        end_tokens[too_early] = NO_TOKEN
    return np.ascontiguousarray(end_tokens.T), hides
