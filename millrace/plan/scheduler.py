"""The scheduler: in every step, lets `computed` catch up with `known` for all rows, under a token budget.

There is no prefill phase and no decode phase. `plan` gives one token to every row that is one token behind, spends the
token budget on rows further behind, and admits waiting requests with the rest. A step therefore has at most
`token_budget` tokens plus one per row. `apply` confirms the oldest launched step. No torch, no clock (time is an
argument), no randomness.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from millrace.params import FinishReason
from millrace.plan.kv.block_pool import BlockPool
from millrace.plan.kv.new_blocks import NewBlocks
from millrace.plan.kv.prefix import PrefixIndex
from millrace.plan.pending_outcome import PendingOutcome, make_pending_outcome
from millrace.plan.queue.admission_forecast import AdmissionForecast
from millrace.plan.queue.delays import Cause, Delays
from millrace.plan.queue.fair_shares import FairShares
from millrace.plan.queue.kv_peak import OutputLengthEstimate
from millrace.plan.queue.policy import FirstCome, Policy
from millrace.plan.queue.waiting import WaitingQueue
from millrace.plan.repeated_decode import RepeatedDecode, repeated_decode_from
from millrace.plan.request import Request, end_of
from millrace.plan.rows import Rows
from millrace.plan.step import (
    Admission,
    Bools,
    Ended,
    Int32s,
    Int64s,
    Release,
    ReleaseReason,
    StepOutcome,
    StepPlan,
)
from millrace.plan.victim import cheapest_victim

MANY_PREFILLS, MANY_PREFILLS_SHARE = 8, 1 / 8
"""With at least this many requests waiting for their first token, and more than this many per decoding row, steps use
the full token budget: short steps would delay more requests than they keep smooth."""
MAX_HELD_SCAN = 256
"""Maximum number of waiting requests examined per step: many may wait for a prefix that is being computed."""
MAX_PREEMPTION_NOTES = 8
"""Preemptions of one request that are kept for `/explain`."""


@dataclass(frozen=True, slots=True)
class _DeferredWork:
    """Bookkeeping of a confirmed step that may run after its tokens are sent."""

    step_no: int
    outcome: PendingOutcome
    drawn: Int32s
    """Tokens of `outcome.table_rows`."""
    ended: list[tuple[int, Ended]]
    """Rows that ended, with their terminal events."""


class Scheduler:
    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_running: int,
        token_budget: int,
        mixed_budget: int = 0,
        prefix_cache: bool = True,
        expected_output: float = 512.0,
        policy: Policy | None = None,
        aging_s: float = 30.0,
    ) -> None:
        self.block_size = block_size
        self.token_budget = token_budget
        self.mixed_budget = min(mixed_budget or token_budget, token_budget)
        self._has_mixed_budget = self.mixed_budget < token_budget
        self.pool = BlockPool(num_blocks)
        self.rows = Rows(max_running, block_size)
        self.prefix = PrefixIndex(self.pool, block_size, prefix_cache)
        self.policy: Policy = policy if policy is not None else FirstCome()
        self.shares = FairShares()
        self.waiting = WaitingQueue(self.policy, self.shares, aging_s)
        self.delays = Delays()
        self.num_preemptions = 0
        self._lengths = OutputLengthEstimate(initial=expected_output)
        self._num_catching_up = 0
        self._in_flight: deque[StepPlan] = deque()
        self._next_step = 0
        self._next_ticket = 0
        self._row_of: dict[int, int] = {}
        self._ended: list[Ended] = []
        self._unannounced: set[int] = set()
        """Admitted rows that no plan has announced to the runner yet."""
        self._chosen_victim: tuple[int, str] | None = None
        """The running request to preempt before the next step, and why."""
        self._releases: list[Release] = []
        self._new_blocks = NewBlocks()
        """Blocks of announced rows that no plan has carried yet."""
        self._repeated: RepeatedDecode | None = None
        self._pending: PendingOutcome | None = None
        """For the oldest step in flight."""
        self._last_outcome: PendingOutcome | None = None
        """For the step confirmed last; None if a row was released since."""
        self._deferred: _DeferredWork | None = None

    # -- requests --------------------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self._row_of)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def has_work(self) -> bool:
        return bool(self._row_of or len(self.waiting) or self._ended)

    def submit(self, request: Request) -> None:
        request.ticket = self._next_ticket
        self._next_ticket += 1
        request.prompt = np.ascontiguousarray(request.prompt, np.int32)
        request.history = bytearray(request.prompt.data)
        needed = -(-request.limit // self.block_size)
        if needed > self.pool.total:
            message = (
                f"The request may need {request.limit} tokens ({needed} KV blocks of {self.block_size} tokens);"
                f" the KV pool has {self.pool.total} blocks. Lower max_tokens or enlarge the KV pool."
            )
            self._end(request, "error", message)
            return
        request.diagnostics.num_ahead = len(self.waiting)
        request.diagnostics.delays_before = self.delays.totals()
        self.shares.enter(request.tenant)
        self.waiting.add(request)

    def abort(self, request_id: int, reason: FinishReason = "abort", message: str = "") -> bool:
        """End a waiting or running request. False if there is none with this id."""
        self.run_deferred()
        row = self._row_of.get(request_id)
        if row is not None:
            request = self._release_row(row, reason)
        elif request_id in self.waiting:
            request = self.waiting.remove(request_id)
        else:
            return False
        self._settle(request)
        self._end(request, reason, message)
        return True

    def take_ended(self) -> tuple[Ended, ...]:
        """Terminal events since the last call, each returned once."""
        ended, self._ended = tuple(self._ended), []
        return ended

    # -- plan ------------------------------------------------------------------------------------------------------

    def plan(self, now: float, *, only: Collection[int] | None = None) -> StepPlan | None:
        """The next step, or None if nothing can be computed before a step in flight completes.

        `only` limits the step to these rows and admits nothing: used to find the request that made a step fail.
        """
        self.run_deferred()
        self._expire(now)
        if only is None:
            self._preempt_chosen()
        preempted_before = self.num_preemptions
        while True:
            singles, chunks = self._catch_up(only)
            if len(singles) or chunks or self._in_flight or only is not None or not self._preempt_one():
                break
        if only is None and len(self.waiting):
            may_admit = self.num_preemptions == preempted_before
            budget = self._budget_for_chunks(len(singles)) - sum(chunks.values())
            self.delays.note(self._admit_waiting(budget, chunks, now) if may_admit else "memory", now)
        if len(singles) == 0 and not chunks:
            return None
        return self._compose(singles, chunks)

    def _expire(self, now: float) -> None:
        late = self.waiting.expired(now)
        if self.rows.num_timed:
            order = self.rows.order
            late += self.rows.request_ids[order[self.rows.deadline[order] < now]].tolist()
        for request_id in late:
            self.abort(request_id, "deadline", "The deadline of the request passed before it finished.")

    def _catch_up(self, only: Collection[int] | None) -> tuple[Int64s, dict[int, int]]:
        """Rows that get one token, and longer chunks by row. Takes the blocks for all of them."""
        singles, behind = self._runnable(only)
        self._num_catching_up = len(behind)
        crossing = self._crossing(singles)
        if len(crossing) > self.pool.num_available:
            while len(crossing) > self.pool.num_available + self.pool.num_fenced and self._preempt_one():
                singles, behind = self._runnable(only)
                crossing = self._crossing(singles)
            stalled = crossing[self.pool.num_available :]
            crossing = crossing[: self.pool.num_available]
            singles = singles[~np.isin(singles, stalled)]
        if len(crossing):
            self._grow_by_one(crossing)
        budget = self._budget_for_chunks(len(singles))
        chunks: dict[int, int] = {}
        for row in behind.tolist():
            count = self._chunk(row, budget)
            if count:
                chunks[row] = count
                budget -= count
        return singles, chunks

    def _runnable(self, only: Collection[int] | None) -> tuple[Int64s, Int64s]:
        """Active rows that are one token behind, and those further behind, each by rank."""
        rows, order = self.rows, self.rows.order
        if len(order) == 0:
            return order, order
        if only is None and self._repeated is not None and self._repeated.can_repeat(rows):
            return order, order[:0]
        if only is not None:
            order = order[np.isin(order, np.fromiter(only, np.int64, len(only)))]
        known = rows.known[order]
        behind = known - rows.computed[order]
        # A row at its limit has drawn its last token, which is not confirmed yet.
        singles = order[(behind == 1) & (known < rows.limit[order])]
        return singles, order[behind > 1]

    def _crossing(self, singles: Int64s) -> Int64s:
        """The rows whose next token needs a new block."""
        if len(singles) == 0:
            return singles
        return singles[self.rows.computed[singles] >= self.rows.num_blocks[singles] * self.block_size]

    def _budget_for_chunks(self, num_singles: int) -> int:
        """Tokens for chunks, in a step that also gives one token to each of `num_singles` rows.

        The token budget does not count those rows: otherwise a prompt that fills it exactly would be split, and its
        last few tokens would need another step. The mixed budget counts them. It keeps steps that also decode short,
        unless many requests wait for their first token.
        """
        num_without_token = len(self.waiting) + self._num_catching_up
        is_many = num_without_token >= MANY_PREFILLS and num_without_token > MANY_PREFILLS_SHARE * num_singles
        if num_singles == 0 or is_many or not self._has_mixed_budget:
            return self.token_budget
        # A quarter is reserved for chunks, so prefill advances however many rows decode.
        return max(self.mixed_budget - num_singles, self.mixed_budget // 4)

    def _chunk(self, row: int, budget: int) -> int:
        """Number of the row's tokens that budget and blocks allow. Takes the blocks.

        If the budget splits a prompt, it does so at a multiple of the token budget where possible: graphs and kernels
        exist for whole chunks.
        """
        computed, known = int(self.rows.computed[row]), int(self.rows.known[row])
        holds = int(self.rows.num_blocks[row]) + self.pool.num_available
        count = max(0, min(known - computed, budget, holds * self.block_size - computed))
        if count == budget:
            past_multiple = (computed + count) % self.token_budget
            count -= past_multiple if past_multiple < count and computed + count < known else 0
        if count:
            self._grow(row, -(-(computed + count) // self.block_size) - int(self.rows.num_blocks[row]))
        return count

    def _grow_by_one(self, crossing: Int64s) -> None:
        """One more block for each of these rows. The only per-row Python work of a repeated decode step."""
        held, blocks_of, unannounced = self.rows.num_blocks[crossing], self.rows.blocks, self._unannounced
        rows, columns, taken = crossing.tolist(), held.tolist(), self.pool.take_many(len(crossing))
        for row, block in zip(rows, taken, strict=True):
            blocks_of[row].append(block)
        if unannounced:
            known = [at for at, row in enumerate(rows) if row not in unannounced]
            rows, columns, taken = ([column[at] for at in known] for column in (rows, columns, taken))
        self._new_blocks.add_each(rows, columns, taken)
        self.rows.num_blocks[crossing] = held + 1

    def _grow(self, row: int, num_blocks: int) -> None:
        blocks, taken = self.rows.blocks[row], self.pool.take_many(num_blocks)
        if row not in self._unannounced:
            self._new_blocks.add_many(row, len(blocks), taken)
        blocks += taken
        self.rows.num_blocks[row] = len(blocks)

    # -- admission -------------------------------------------------------------------------------------------------

    def _admit_waiting(self, budget: int, chunks: dict[int, int], now: float) -> Cause:
        """Admit waiting requests while budget, free rows and the admission forecast allow. Returns what stopped it.

        Strictly in queue order, except that a request may overtake others that wait for a prefix being computed.
        """
        if budget <= 0:
            return "budget"
        if self.rows.num_free == 0:
            return self._choose_victim(next(self.waiting.in_order(now)), "rows", now)
        forecast = AdmissionForecast(self.rows, self.pool, self._lengths)
        for request in itertools.islice(self.waiting.in_order(now), MAX_HELD_SCAN):
            if budget <= 0:
                return "budget"
            if self.rows.num_free == 0:
                return "rows"
            if self.prefix.is_held(request):
                continue
            blocks = self.prefix.match(request)
            if self.prefix.must_wait(request, len(blocks)):
                continue
            if not forecast.admit(request, blocks):
                return self._choose_victim(request, "memory", now)
            self.waiting.remove(request.id)
            row = self._admit(request, blocks, now)
            count = self._chunk(row, budget)
            if count:
                chunks[row] = count
                budget -= count
        return "prefix" if len(self.waiting) else "none"

    def _choose_victim(self, request: Request, cause: Cause, now: float) -> Cause:
        """Choose a running request to preempt for this one when the next step is planned. Returns `cause`.

        Chooses none while fenced rows or blocks are about to become free, nor one that would precede this request.
        """
        if self._chosen_victim is None and self.rows.num_fenced == 0 and self.pool.num_fenced == 0:
            row = self.policy.victim_for(self.rows, request)
            if row is not None:
                other = self.rows.request(row)
                other.num_output = int(self.rows.known_host[row] - self.rows.num_prompt[row])
                if self.waiting.would_precede(request, other, now):
                    self._chosen_victim = (other.id, f"a more urgent request could not be admitted ({cause})")
        return cause

    def _preempt_chosen(self) -> None:
        if self._chosen_victim is None:
            return
        request_id, why = self._chosen_victim
        self._chosen_victim = None
        row = self._row_of.get(request_id)
        if row is not None and len(self.waiting):
            self.rows.request(row).yields += 1
            self._preempt(row, why)

    def _admit(self, request: Request, blocks: list[int], now: float) -> int:
        self.pool.share(blocks)
        if request.preemptions == 0:
            request.cached_tokens = len(blocks) * self.block_size
            self.delays.note("none", now)
            request.diagnostics.waited_for = self.delays.since(request.diagnostics.delays_before)
            request.diagnostics.diverged_at = self.prefix.divergence(request, len(blocks))
            self._charge(request)
        self.prefix.count(request, len(blocks))
        self.prefix.expect(request, len(blocks))
        request.held_by = None
        row = self.rows.admit(request, blocks)
        self._row_of[request.id] = row
        self._unannounced.add(row)
        return row

    # -- preemption and release ------------------------------------------------------------------------------------

    def _preempt_one(self) -> bool:
        """Preempt the row that is cheapest to recompute. False if there is none: the first row always stays."""
        victim = cheapest_victim(self.rows)
        if victim is None:
            return False
        self._preempt(victim, "KV blocks ran out and it was the cheapest to recompute")
        return True

    def _preempt(self, row: int, why: str) -> None:
        request = self._release_row(row, "preempted")
        request.preemptions += 1
        self.num_preemptions += 1
        if len(request.diagnostics.preempted_for) < MAX_PREEMPTION_NOTES:
            request.diagnostics.preempted_for.append(f"after {request.num_output} tokens: {why}")
        self.waiting.add(request)

    def _release_row(self, row: int, reason: ReleaseReason) -> Request:
        fence = self._next_step - 1 if self._in_flight else None
        self._register_blocks(row, int(self.rows.confirmed[row]) // self.block_size)
        request, blocks = self.rows.release(row, fence)
        self.prefix.forget(request)
        self.pool.release(reversed(blocks), fence)
        del self._row_of[request.id]
        self._pending = self._last_outcome = None
        if row in self._unannounced:
            self._unannounced.discard(row)
        else:
            self._new_blocks.drop(row)
            self._releases.append(Release(row, request.id, reason))
        return request

    def _end(self, request: Request, reason: FinishReason, message: str = "") -> None:
        self._ended.append(end_of(request, reason, request.num_output, message=message))

    # -- fair shares -----------------------------------------------------------------------------------------------

    def _charge(self, request: Request) -> None:
        """On admission, charge the tenant for the prompt and the expected output."""
        request.charged = self._lengths.remaining_of_one(0, request.max_tokens)
        num_prompt = request.num_prompt - request.cached_tokens
        self.shares.charge(request.tenant, request.weight, num_prompt, request.charged)

    def _settle(self, request: Request) -> None:
        """At the end, correct the charge to the actual output."""
        if request.charged:
            self.shares.charge(request.tenant, request.weight, 0, request.num_output - request.charged)
        self.shares.leave(request.tenant)

    # -- composing a plan ------------------------------------------------------------------------------------------

    def _compose(self, singles: Int64s, chunks: dict[int, int]) -> StepPlan:
        rows, repeated = self.rows, self._repeated
        if repeated is not None and singles is repeated.order and not chunks:
            return self._repeat(repeated)
        table_rows, counts = _columns(singles, chunks)
        starts, known = rows.computed[table_rows], rows.known[table_rows]
        ends = starts + counts
        rows.computed[table_rows] = ends
        # The token that this step draws counts as known from here on, although only the device will have it.
        rows.known[table_rows] = np.maximum(known, ends + 1)
        admitted = self._admissions(chunks, singles) if self._unannounced else ()
        block_rows, block_cols, block_ids = self._new_blocks.take()
        plan = StepPlan(
            step_no=self._next_step,
            rows=table_rows.astype(np.int32),
            starts=starts,
            counts=counts,
            samples=ends == known,
            block_rows=block_rows,
            block_cols=block_cols,
            block_ids=block_ids,
            admitted=admitted,
            released=tuple(self._releases),
            shared_blocks=0 if chunks else self._shared_blocks(int(table_rows[0])),
        )
        self._releases.clear()
        self._in_flight.append(plan)
        self._next_step += 1
        self._repeated = repeated_decode_from(plan, singles, rows)
        return plan

    def _repeat(self, repeated: RepeatedDecode) -> StepPlan:
        """What `_compose` would return for the same rows, reusing the columns of the previous plan."""
        rows, order, before = self.rows, repeated.order, repeated.plan
        starts = before.starts + 1
        rows.computed[order] = starts + 1
        rows.known[order] = starts + 2
        block_rows, block_cols, block_ids = self._new_blocks.take()
        plan = StepPlan(
            step_no=self._next_step,
            rows=before.rows,
            starts=starts,
            counts=before.counts,
            samples=before.samples,
            block_rows=block_rows,
            block_cols=block_cols,
            block_ids=block_ids,
            shared_blocks=self._shared_blocks(int(order[0])),
            is_repeated_decode=True,
        )
        self._in_flight.append(plan)
        self._next_step += 1
        repeated.advance(plan)
        return plan

    def _shared_blocks(self, row: int) -> int:
        """Number of this row's leading blocks that every running row shares.

        A shared block has the same column in every row, and reference counts never grow along a row, so a binary
        search finds the last block that all rows reference.
        """
        blocks, num_running = self.rows.blocks[row], self.num_running
        if num_running < 2 or not blocks or self.pool.num_refs(blocks[0]) < num_running:
            return 0
        return bisect_left(blocks, True, key=lambda block: self.pool.num_refs(block) < num_running)

    def _admissions(self, chunks: dict[int, int], singles: Int64s) -> tuple[Admission, ...]:
        """Announce the rows of this step that the runner does not know yet, with all their blocks."""
        sent = self._unannounced & chunks.keys()
        if len(sent) < len(self._unannounced):
            sent |= self._unannounced.intersection(singles.tolist())
        self._unannounced -= sent
        admissions = []
        for row in sorted(sent):
            request = self.rows.request(row)
            self._new_blocks.add_many(row, 0, self.rows.blocks[row])
            admissions.append(Admission(row, request.id, self.rows.tokens(row), request.num_prompt, request.row_params))
        return tuple(admissions)

    # -- apply -----------------------------------------------------------------------------------------------------

    def apply(self, step_no: int, tokens: Int32s) -> StepOutcome:
        """Confirm the oldest launched step. `tokens` were drawn by its sampling rows, in plan order."""
        outcome = self.confirm(step_no, tokens)
        self.run_deferred()
        return outcome

    def prepare_outcome(self) -> None:
        """Compute the pending outcome of the oldest step in flight. Call it while the device runs the step."""
        self.run_deferred()
        if self._pending is None and self._in_flight:
            self._pending = self._make_pending(self._in_flight[0])

    def _make_pending(self, plan: StepPlan) -> PendingOutcome:
        before = self._last_outcome
        if plan.is_repeated_decode and before is not None and before.can_repeat:
            return before.next()
        return make_pending_outcome(plan, self.rows)

    def confirm(self, step_no: int, tokens: Int32s) -> StepOutcome:
        """The urgent part of `apply`: which request gets which token, and which requests have ended."""
        self.run_deferred()
        plan = self._in_flight.popleft()
        if plan.step_no != step_no:
            raise AssertionError(f"step {step_no} completed, but {plan.step_no} is the oldest in flight")
        outcome = self._pending or self._make_pending(plan)
        self._pending, self._last_outcome = None, outcome
        drawn = outcome.active_tokens(tokens)
        stopped = outcome.stopped(drawn)
        ended = outcome.ends(self.rows, drawn, stopped)
        self._ended += [event for _, event in ended]
        self._deferred = _DeferredWork(step_no, outcome, drawn, ended)
        return self._step_outcome(step_no, outcome, drawn, stopped)

    def run_deferred(self) -> None:
        """Do the bookkeeping that `plan` and `confirm` deferred: hash and register blocks, store tokens, release rows
        of ended requests. Every method that depends on it calls this first."""
        self.prefix.hash_expected()
        if self._deferred is None:
            return
        done, self._deferred = self._deferred, None
        rows, outcome = self.rows, done.outcome
        rows.confirmed[outcome.computed_rows] = outcome.computed
        rows.append(outcome.table_rows, outcome.positions, done.drawn)
        self.pool.complete(done.step_no)
        rows.complete(done.step_no)
        if not outcome.is_repeated:  # A repeated decode step only fills blocks of tokens drawn since admission.
            self._register_admitted_blocks(outcome.computed_rows)
        for row, event in done.ended:
            request = self._release_row(row, event.reason)
            self._lengths.observe(request.num_output)
            self.policy.learn(request)
            self._settle(request)

    def _register_admitted_blocks(self, computed_rows: Int64s) -> None:
        """Register the blocks this step filled with tokens known at admission: other requests may wait for them.

        Blocks of generated tokens are registered when their row is released, so decode steps do not pay for it.
        """
        rows = self.rows
        full = np.minimum(rows.confirmed[computed_rows] // self.block_size, rows.num_full_at_admission[computed_rows])
        for index in np.flatnonzero(full > rows.num_registered[computed_rows]).tolist():
            self._register_blocks(int(computed_rows[index]), int(full[index]))

    def _register_blocks(self, row: int, num_full: int) -> None:
        first = int(self.rows.num_registered[row])
        self.prefix.register_blocks(self.rows.request(row), first, self.rows.blocks[row][first:num_full])
        self.rows.num_registered[row] = num_full

    def _step_outcome(self, step_no: int, outcome: PendingOutcome, drawn: Int32s, stopped: Bools | None) -> StepOutcome:
        request_ids = outcome.request_ids
        index = outcome.sample_index
        if stopped is not None:  # An end token is not part of the answer.
            delivered = ~stopped
            request_ids, drawn, index = request_ids[delivered], drawn[delivered], index[delivered]
        return StepOutcome(
            step_no=step_no,
            request_ids=request_ids,
            tokens=drawn,
            sample_index=index,
            first_ids=outcome.first_ids,
            ended=self.take_ended(),
        )

    def discard_in_flight(self) -> tuple[int, ...]:
        """A launched step failed: discard all steps in flight and announce every row to the runner again.

        Returns the active rows of the oldest step. One of them caused the failure.
        """
        self.run_deferred()
        suspects = tuple(row for row in self._in_flight[0].rows.tolist() if self.rows.active[row])
        self._in_flight.clear()
        self._repeated = None
        self._pending = self._last_outcome = None
        self.pool.complete(self._next_step)
        self.rows.complete(self._next_step)
        self.rows.rewind()
        self._unannounced = set(self._row_of.values())
        self._new_blocks.clear()
        self._releases.clear()
        return suspects


def _columns(singles: Int64s, chunks: dict[int, int]) -> tuple[Int64s, Int32s]:
    """The rows of a step and the number of tokens of each."""
    if not chunks:
        return singles, np.ones(len(singles), np.int32)
    rows, counts = np.array(list(chunks), np.int64), np.array(list(chunks.values()), np.int32)
    if not len(singles):
        return rows, counts
    return np.concatenate([singles, rows]), np.concatenate([np.ones(len(singles), np.int32), counts])
