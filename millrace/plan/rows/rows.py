"""The running requests as columns, one entry per table row: a few array operations advance all rows by a step.

Progress is counted in three numbers. `known_host` and `confirmed` include only completed steps. `known` and `computed`
include launched steps, each with the least it can give: one token to a row that draws. `slack` is how many tokens more
the launched steps may give to the row, if all their drafts are accepted.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from millrace.plan.request import Request
from millrace.plan.rows.end_tokens import EndTokens
from millrace.plan.rows.flows import Flows
from millrace.plan.step import Int32s, Int64s

ALWAYS = np.iinfo(np.int32).max
"""`Rows.logits_until` of a row that every token is drawn for from logits."""
TAIL_BLOCKS = 16
"""Tokens of so many blocks are moved to a request's history at once: it is the work of one row in Python."""
_NO_ROWS = np.zeros(0, np.int64)


class Rows:
    def __init__(self, capacity: int, block_size: int, num_groups: int = 1) -> None:
        self.capacity = capacity
        self.block_size = block_size
        self.num_groups = num_groups
        """KV groups: each row has one block list per group."""
        self.epoch = 0
        """Increased by every change of the set of rows or of their order."""
        self.request_ids = np.zeros(capacity, np.int64)
        self.rank = np.zeros(capacity, np.int64)
        """`Request.rank`: lower goes first."""
        self.known = np.zeros(capacity, np.int32)
        self.computed = np.zeros(capacity, np.int32)
        self.known_host = np.zeros(capacity, np.int32)
        self.confirmed = np.zeros(capacity, np.int32)
        self.slack = np.zeros(capacity, np.int32)
        self.limit = np.zeros(capacity, np.int32)
        self.num_prompt = np.zeros(capacity, np.int32)
        self.deadline = np.full(capacity, np.inf)
        self.priority = np.zeros(capacity, np.int32)
        self.num_yields = np.zeros(capacity, np.int32)
        """`Request.yields`."""
        self.expected = np.full(capacity, np.nan)
        """Output tokens expected of the request; NaN: as many as of any other."""
        self.num_known_at_admission = np.zeros(capacity, np.int32)
        self.active = np.zeros(capacity, np.bool_)
        self.end_tokens = EndTokens(capacity)
        self._add_tails()
        self._add_block_columns()
        self._add_flow_columns()
        self._add_grammar_columns()
        self._add_result_columns()
        self.requests: list[Request | None] = [None] * capacity
        self.num_constrained = 0
        """Active rows with a grammar."""
        self.num_timed = 0
        """Active rows with a deadline."""
        self.num_active = 0
        self._free = list(range(capacity - 1, -1, -1))
        self._fenced: deque[tuple[int, int]] = deque()
        self._add_order()

    def _add_tails(self) -> None:
        capacity, width = self.capacity, TAIL_BLOCKS * self.block_size
        self.tail = np.zeros((capacity, width), np.int32)
        """Confirmed tokens that are not in the request's history yet."""
        self.tail_start = np.zeros(capacity, np.int32)
        """Position of the first of them, at the beginning of a block."""
        self._flat_tail = self.tail.reshape(-1)
        self._tail_places = np.arange(capacity) * width
        """Where the token at position 0 would be in `_flat_tail`."""
        self._appends_left = 1
        """Calls of `append` after which a tail may be full, and not before."""

    def _add_order(self) -> None:
        self._order = _NO_ROWS
        """Rows by rank, without `_newest`, but with those that left, if `_has_left`."""
        self._newest: list[int] = []
        self._has_left = False
        self._last_rank = -1
        """No row has a higher rank."""

    def _add_grammar_columns(self) -> None:
        self.constrained = np.zeros(self.capacity, np.bool_)
        """`Request.constrained`."""
        self.can_draft = np.zeros(self.capacity, np.bool_)
        """`Request.can_draft`."""
        self.appended: dict[int, Int32s] = {}
        """By row: tokens that its grammar forces after the one that a step in flight draws. They count as known."""

    def _add_result_columns(self) -> None:
        self.scored = np.zeros(self.capacity, np.bool_)
        """`Request.scores_prompt`."""
        self.num_scored = 0
        """Active rows with prompt log-probabilities."""
        self.pooled = np.zeros(self.capacity, np.bool_)
        """`Request.pools`."""
        self.num_pooled = 0
        """Active rows whose result is a pooled hidden state."""
        self.silent = np.zeros(self.capacity, np.bool_)
        """True for rows that draw nothing: `Request.draws` is False."""
        self.num_silent = 0
        """Active rows that draw nothing."""
        self.logits_until = np.zeros(self.capacity, np.int32)
        """Number of known tokens below which the row is drawn from logits: always, up to its minimum length, or 0."""
        self.num_from_logits = 0
        """Active rows for which that is not 0."""
        self.num_with_minimum = 0
        """Active rows for which it is a number that they may pass."""
        self.beyond_head = np.zeros(self.capacity, np.bool_)
        """True for rows whose draw is more than a head: they are shaped, or get log-probabilities."""
        self.num_beyond_head = 0
        """Active rows of that kind."""
        self.adapted = np.zeros(self.capacity, np.int8)
        """`Request.adapter_changes` of rows with an adapter, otherwise 0."""
        self.num_adapted = 0
        """Active rows with an adapter."""

    def _add_flow_columns(self) -> None:
        self.classes: set[int] = set()
        """Priority classes of all requests so far."""
        self.flows = Flows()
        self.flow = np.zeros(self.capacity, np.int64)
        """Number of the row's flow."""
        self.skipped = np.zeros(self.capacity, np.int32)
        """Steps in a row that left the row out although it could have decoded."""

    def _add_block_columns(self) -> None:
        capacity, num_groups = self.capacity, self.num_groups
        self.num_blocks = np.zeros(capacity, np.int32)
        """Columns of the row's block table in use, in every group."""
        self.num_dropped = np.zeros((num_groups, capacity), np.int32)
        """Leading columns whose blocks were freed because they are behind the group's window."""
        self.num_shared = np.zeros(capacity, np.int32)
        """Blocks found in the prefix cache at admission. Preempting the row might not free them."""
        self.num_full_at_admission = np.zeros(capacity, np.int32)
        """Full blocks of the tokens known at admission. Other requests may wait for these."""
        self.num_registered = np.zeros(capacity, np.int32)
        """Blocks registered in the prefix cache."""
        self.blocks: list[list[list[int]]] = [[] for _ in range(capacity)]
        """Block ids by row and group; 0 in columns behind the group's window."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_fenced(self) -> int:
        """Rows that become free when the steps in flight have completed."""
        return len(self._fenced)

    @property
    def order(self) -> Int64s:
        """Active rows by rank."""
        if self._newest:
            self._order = np.concatenate((self._order, self._newest))
            self._newest = []
        if self._has_left:
            self._order = self._order[self.active[self._order]]
            self._has_left = False
        return self._order

    def _insert(self, row: int, rank: int) -> None:
        """Add a row to the order. Its column `active` is not set yet."""
        if self._has_left or rank < self._last_rank:
            order = self.order
            self._order = np.insert(order, np.searchsorted(self.rank[order], rank, side="right"), row)
        else:  # Most requests go last; more urgent or preempted ones go earlier.
            self._newest.append(row)
        self._last_rank = max(self._last_rank, rank)

    @property
    def all_draw_alike(self) -> bool:
        """True if all rows are drawn from logits at any length, or none is."""
        return not self.num_from_logits or (self.num_from_logits == self.num_active and not self.num_with_minimum)

    def most_urgent(self, table_rows: Int64s) -> int:
        """The most urgent class of these rows."""
        return next(iter(self.classes)) if len(self.classes) == 1 else int(self.priority[table_rows].min())

    def request(self, row: int) -> Request:
        request = self.requests[row]
        if request is None:
            raise AssertionError(f"row {row} holds no request")
        return request

    def admit(self, request: Request, blocks: list[list[int]]) -> int:
        """Give a free row to a request whose first blocks, by group, were found in the prefix cache."""
        row = self._free.pop()
        num_known, num_prompt = len(request.history) // 4, request.num_prompt
        num_columns = len(blocks[0])
        num_cached = num_columns * self.block_size
        self.request_ids[row] = request.id
        self.known[row] = self.known_host[row] = num_known
        self.computed[row] = self.confirmed[row] = num_cached
        self.slack[row] = 0
        self.limit[row] = num_prompt + request.max_tokens
        self.num_prompt[row] = num_prompt
        if request.deadline < math.inf:
            self.deadline[row] = request.deadline
            self.num_timed += 1
        self.num_blocks[row] = self.num_shared[row] = self.num_registered[row] = num_columns
        for group, ids in enumerate(blocks):
            is_whole = not ids or ids[0] != 0
            first = 0 if is_whole else next((at for at, block in enumerate(ids) if block), num_columns)
            self.num_dropped[group, row] = first
        self.num_full_at_admission[row] = num_known // self.block_size
        self.priority[row] = request.priority
        self.classes.add(request.priority)
        self.flow[row] = self.flows.enter(request)
        self.skipped[row] = 0
        self.constrained[row] = request.constrained
        self.num_constrained += request.constrained
        self.can_draft[row] = request.can_draft
        self._set_results(row, request)
        self.num_yields[row] = request.yields
        self.num_known_at_admission[row] = num_known
        self.end_tokens.set(row, request)
        self._split_history(row, request, num_known)
        self.requests[row] = request
        self.blocks[row] = blocks
        self._insert(row, request.rank)
        self.rank[row] = request.rank
        self.active[row] = True
        self.num_active += 1
        self.epoch += 1
        return row

    def _set_results(self, row: int, request: Request) -> None:
        if request.scores_prompt:
            self.scored[row] = True
            self.num_scored += 1
        if request.pools:
            self.pooled[row] = True
            self.num_pooled += 1
        if request.adapter:
            self.adapted[row] = request.adapter_changes
            self.num_adapted += 1
        if not request.draws:
            self.silent[row] = True
            self.num_silent += 1
        until = logits_until(request)
        is_beyond = until > 0 and request.beyond_head
        self.logits_until[row], self.beyond_head[row] = until, is_beyond
        if until:
            self.num_from_logits += 1
            self.num_with_minimum += until != ALWAYS
        self.num_beyond_head += is_beyond

    def release(self, row: int, fence: int | None) -> tuple[Request, list[list[int]]]:
        """Empty a row. Returns its request, with the full history, and the blocks to release, by group."""
        request = self.request(row)
        request.history += self.tail[row, : int(self.known_host[row]) - len(request.history) // 4].tobytes()
        request.num_output = int(self.known_host[row] - self.num_prompt[row])
        if request.deadline < math.inf:
            self.deadline[row] = np.inf
            self.num_timed -= 1
        self.num_constrained -= request.constrained
        if self.num_scored:
            self.num_scored -= request.scores_prompt
            self.scored[row] = False
        if self.num_pooled:
            self.num_pooled -= request.pools
            self.pooled[row] = False
        if self.num_adapted:
            self.num_adapted -= request.adapter > 0
            self.adapted[row] = 0
        if self.num_silent:
            self.num_silent -= not request.draws
            self.silent[row] = False
        if self.num_from_logits:
            until = int(self.logits_until[row])
            self.num_from_logits -= until > 0
            self.num_with_minimum -= 0 < until < ALWAYS
            self.num_beyond_head -= int(self.beyond_head[row])
        self.end_tokens.clear(row, request)
        self.flows.leave(int(self.flow[row]))
        self.num_active -= 1
        self.active[row] = False
        self.requests[row] = None
        self.appended.pop(row, None)
        blocks, self.blocks[row] = self.blocks[row], []
        self._has_left = True
        self.epoch += 1
        if fence is None:
            self._free.append(row)
        else:
            self._fenced.append((fence, row))
        return request, blocks

    def complete(self, step_no: int) -> None:
        """Step `step_no` and all before it have completed: free the rows fenced by them."""
        while self._fenced and self._fenced[0][0] <= step_no:
            self._free.append(self._fenced.popleft()[1])

    def append(self, table_rows: Int64s, positions: Int32s, drawn: Int32s) -> None:
        """Append one confirmed token to each row, at the given positions."""
        places = self._tail_places[table_rows]
        places += positions
        self._flat_tail[places] = drawn
        self.known_host[table_rows] = positions + 1
        self._appends_left -= 1
        if not self._appends_left:
            self._fold_full()

    def append_many(self, table_rows: Int64s, positions: Int32s, drawn: Int32s) -> None:
        """`append` for several steps: `drawn` is [steps, rows], and `positions` are those of the first step."""
        at = 0
        while at < len(drawn):
            count = min(len(drawn) - at, self._appends_left)
            places = (self._tail_places[table_rows] + positions + at)[:, None] + np.arange(count)
            self._flat_tail[places] = drawn[at : at + count].T
            at += count
            self.known_host[table_rows] = positions + at
            self._appends_left -= count
            if not self._appends_left:
                self._fold_full()

    def _fold_full(self) -> None:
        """Fold the tails that are full, and find out when the next one can be."""
        active, width = self.active.nonzero()[0], self.tail.shape[1]
        lengths = self.known_host[active] - self.tail_start[active]
        is_full = lengths == width
        for row in active[is_full].tolist():
            self.fold(row)
        # A new row begins with less than a block.
        longest = max(self.block_size - 1, int(lengths[~is_full].max(initial=0)))
        self._appends_left = width - longest

    def fold(self, row: int) -> None:
        """Move the full blocks of a row's tail to the history of its request."""
        start = int(self.tail_start[row])
        num_tail = int(self.known_host[row]) - start
        full = num_tail // self.block_size * self.block_size
        if full:
            self.request(row).history += self.tail[row, :full].tobytes()
            self.tail[row, : num_tail - full] = self.tail[row, full:num_tail]
            self._start_tail(row, start + full)

    def rewind(self) -> None:
        """Undo all steps in flight: planned progress goes back to confirmed progress."""
        np.copyto(self.known, self.known_host)
        np.copyto(self.computed, self.confirmed)
        self.slack[:] = 0
        self.appended.clear()

    def extend(self, row: int, tokens: Int32s) -> None:
        """Tokens follow the one that a step in flight draws."""
        self.known[row] += len(tokens)
        self.appended[row] = tokens
        self.epoch += 1

    def store(self, row: int, tokens: Int32s) -> None:
        """Append confirmed tokens to one row."""
        at = np.array([row])
        for place in range(len(tokens)):
            self.append(at, self.known_host[at], tokens[place : place + 1])

    def tokens(self, row: int) -> Int32s:
        """All confirmed tokens of a row."""
        request, num_known = self.request(row), int(self.known_host[row])
        if num_known == len(request.prompt):
            return request.prompt
        num_tail = num_known - len(request.history) // 4
        return np.concatenate([np.frombuffer(bytes(request.history), np.int32), self.tail[row, :num_tail]])

    def _split_history(self, row: int, request: Request, num_known: int) -> None:
        """Move the tokens after the last full block from the history to the row's tail."""
        full = num_known // self.block_size * self.block_size
        self._start_tail(row, full)
        if full < num_known:
            prompt, at = request.prompt, row * self.tail.shape[1]
            rest = prompt[full:] if num_known == len(prompt) else np.frombuffer(request.history[full * 4 :], np.int32)
            self._flat_tail[at : at + num_known - full] = rest
            del request.history[full * 4 :]

    def _start_tail(self, row: int, start: int) -> None:
        self.tail_start[row] = start
        self._tail_places[row] = row * self.tail.shape[1] - start


def logits_until(request: Request) -> int:
    params = request.row_params
    if params.params.needs_logits:
        return ALWAYS
    return request.num_prompt + params.params.min_tokens if params.has_late_ends else 0
