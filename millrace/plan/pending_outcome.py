"""What is known of a launched step before its tokens are: who gets one, whose first it is, who comes to the end of its
length. Worked out while the device computes, so that little is left to do between a token and whoever waits for it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from millrace.plan.request import end_of
from millrace.plan.rows import NO_TOKEN, Rows
from millrace.plan.step import Bools, Ended, Int32s, Int64s, StepPlan


@dataclass(slots=True)  # nobody changes it, but one that is frozen takes several times as long to make
class PendingOutcome:
    """Holds as long as no row is taken or given up. Columns over the rows that draw a token and are still there."""

    computed_rows: Int64s
    """The step's rows that are still there, and how many tokens of each will be computed."""
    computed: Int32s
    places: Int64s
    """Of the drawing rows among all that the step samples."""
    all_here: bool
    table_rows: Int64s
    request_ids: Int64s
    first_ids: Int64s
    """Requests that get their first token."""
    positions: Int32s
    """Those that the new tokens take."""
    full: Bools
    """The token is the last that the request's limit allows."""
    full_ends: dict[int, Ended]
    """By place, how those end, unless the token stops them."""
    end_tokens: Int32s | None
    """In a column for each row, the tokens that would stop it now; None when there is no row with any."""
    steps_left: int
    """Steps of the same rows, after this one, until one of them comes to the end of its length."""
    hides_ends: bool
    """Some row is too short to be stopped by its end tokens."""
    repeats: bool = False
    """The step before was of the same rows, and all of them were there."""

    @property
    def lasts(self) -> bool:
        """Whether no more than positions will differ, should the next step repeat this one."""
        return self.all_here and self.steps_left > 1 and not self.hides_ends

    def next(self) -> PendingOutcome:
        """Of the step that repeats this one."""
        return PendingOutcome(
            computed_rows=self.computed_rows,
            computed=self.computed + 1,
            places=self.places,
            all_here=True,
            table_rows=self.table_rows,
            request_ids=self.request_ids,
            first_ids=self.first_ids[:0],
            positions=self.positions + 1,
            full=self.full,
            full_ends={},
            end_tokens=self.end_tokens,
            steps_left=self.steps_left - 1,
            hides_ends=False,
            repeats=True,
        )

    def delivered(self, tokens: Int32s) -> Int32s:
        """Of the tokens that the step drew, those of rows that are still there."""
        return tokens if self.all_here else tokens[self.places]

    def stopped(self, drawn: Int32s) -> Bools | None:
        """Which of the rows drew a token that stops them; None when none did."""
        if self.end_tokens is None:
            return None
        is_end = self.end_tokens == drawn
        if not is_end.any():
            return None
        stopped: Bools = is_end.any(axis=0)
        return stopped

    def ends(self, rows: Rows, drawn: Int32s, stopped: Bools | None) -> list[tuple[int, Ended]]:
        """Rows that have ended, and how, in the step's order."""
        if stopped is None:
            return [(int(self.table_rows[at]), ended) for at, ended in self.full_ends.items()]
        ends = []
        for at in (stopped | self.full).nonzero()[0].tolist():
            row = int(self.table_rows[at])
            if stopped[at]:
                num_output = int(self.positions[at]) + 1 - rows.request(row).num_prompt
                ends.append((row, end_of(rows.request(row), "stop", num_output, stop_token_id=int(drawn[at]))))
            else:
                ends.append((row, self.full_ends[at]))
        return ends


def make_pending_outcome(plan: StepPlan, rows: Rows) -> PendingOutcome:
    computed_rows = table_rows = plan.rows.astype(np.int64)  # as arrays are indexed, once for all
    here, computed = rows.active[computed_rows], plan.starts + plan.counts
    all_here = bool(here.all())
    if not plan.samples.all():
        table_rows = table_rows[plan.samples]
    places = np.arange(len(table_rows))
    if not all_here:
        computed_rows, computed = computed_rows[here], computed[here]
        places = rows.active[table_rows].nonzero()[0]
        table_rows = table_rows[places]
    positions, request_ids = rows.known_host[table_rows], rows.request_ids[table_rows]
    left = rows.limit[table_rows] - positions - 1
    full = left <= 0
    end_tokens, hides_ends = _end_tokens(rows, table_rows, positions) if rows.num_with_ends else (None, False)
    return PendingOutcome(
        computed_rows=computed_rows,
        computed=computed,
        places=places,
        all_here=all_here,
        table_rows=table_rows,
        request_ids=request_ids,
        first_ids=request_ids[positions == rows.num_prompt[table_rows]],
        positions=positions,
        full=full,
        full_ends=_full_ends(rows, table_rows, positions, full),
        end_tokens=end_tokens,
        steps_left=int(left.min()) if len(left) else 0,
        hides_ends=hides_ends,
    )


def _full_ends(rows: Rows, table_rows: Int64s, positions: Int32s, full: Bools) -> dict[int, Ended]:
    ends = {}
    for at in full.nonzero()[0].tolist():
        request = rows.request(int(table_rows[at]))
        ends[at] = end_of(request, "length", int(positions[at]) + 1 - request.num_prompt)
    return ends


def _end_tokens(rows: Rows, table_rows: Int64s, positions: Int32s) -> tuple[Int32s, bool]:
    """[most of a row, rows]; and whether some are left out because their rows are too short for them."""
    end_tokens: Int32s = rows.end_tokens[table_rows]
    too_early = positions < rows.ends_from[table_rows]
    hides = bool(too_early.any())
    if hides:
        end_tokens[too_early] = NO_TOKEN
    return np.ascontiguousarray(end_tokens.T), hides
