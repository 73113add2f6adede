"""The unified token-budget scheduler: lets `computed` catch up with `known`, under a budget, for all rows at once.

There is no prefill phase and no decode phase. Each `plan` gives one token to every row that is one behind, then the
budget to rows that are further behind, first in the queue first, then seats waiting requests. So a step has at most
`token_budget` tokens and one more for each row. Each `apply` confirms the oldest launched step. Pure: no torch, no
clock (time is an argument), no randomness.
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

CROWD, CROWD_SHARE = 8, 1 / 8
"""Requests without a first token that are a crowd, and their least share of the streams: then steps are made long,
because those who wait are many, and all of them wait for the last."""
HELD_SCAN = 256
"""WaitingQueue requests looked at in one step when those ahead wait for another's prefix."""
MOST_SENTENCES = 8
"""Preemptions of one request that are remembered in words."""


@dataclass(frozen=True, slots=True)
class _Untidy:
    """What `confirm` leaves to `run_deferred`."""

    step_no: int
    seen: PendingOutcome
    drawn: Int32s
    """Tokens of `seen.table_rows`."""
    ended: list[tuple[int, Ended]]
    """Rows, and how."""


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
        self._keeps_short = self.mixed_budget < token_budget
        self.pool = BlockPool(num_blocks)
        self.rows = Rows(max_running, block_size)
        self.prefix = PrefixIndex(self.pool, block_size, prefix_cache)
        self.policy: Policy = policy if policy is not None else FirstCome()
        self.shares = FairShares()
        self.waiting = WaitingQueue(self.policy, self.shares, aging_s)
        self.delays = Delays()
        self.num_preemptions = 0
        self._lengths = OutputLengthEstimate(guess=expected_output)
        self._num_catching_up = 0
        self._in_flight: deque[StepPlan] = deque()
        self._next_step = 0
        self._next_ticket = 0
        self._row_of: dict[int, int] = {}
        self._ended: list[Ended] = []
        self._unsent: set[int] = set()
        """Rows whose request and blocks the runner has not been told of."""
        self._yielding: tuple[int, str] | None = None
        """The running request that is to give way, and why."""
        self._releases: list[Release] = []
        self._new_blocks = NewBlocks()
        """Of rows that the runner knows."""
        self._steady: RepeatedDecode | None = None
        self._foreseen: PendingOutcome | None = None
        """Of the oldest step in flight."""
        self._foreseen_before: PendingOutcome | None = None
        """Of the step that was confirmed last, unless a row has been given up since."""
        self._untidy: _Untidy | None = None

    # -- what callers ask ------------------------------------------------------------------------------------------

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
                f"The request may come to {request.limit} tokens, {needed} KV blocks of {self.block_size};"
                f" the pool has {self.pool.total}. Lower max_tokens or give the KV pool more memory."
            )
            self._end(request, "error", message)
            return
        request.story.num_ahead = len(self.waiting)
        request.story.delays_before = self.delays.totals()
        self.shares.enter(request.tenant)
        self.waiting.add(request)

    def abort(self, request_id: int, reason: FinishReason = "abort", message: str = "") -> bool:
        """End a request at any moment. False if it is not here (any more)."""
        self.run_deferred()
        row = self._row_of.get(request_id)
        if row is not None:
            request = self._leave(row, reason)
        elif request_id in self.waiting:
            request = self.waiting.remove(request_id)
        else:
            return False
        self._settle(request)
        self._end(request, reason, message)
        return True

    def take_ended(self) -> tuple[Ended, ...]:
        """Requests that ended outside a step, each told once."""
        ended, self._ended = tuple(self._ended), []
        return ended

    # -- plan ------------------------------------------------------------------------------------------------------

    def plan(self, now: float, *, only: Collection[int] | None = None) -> StepPlan | None:
        """The next step, or None if nothing can be computed before a step in flight completes.

        `only` limits the step to these rows and seats nobody: how a failed step is taken apart.
        """
        self.run_deferred()
        self._expire(now)
        if only is None:
            self._give_way()
        preempted_before = self.num_preemptions
        while True:
            singles, chunks = self._catch_up(only)
            if len(singles) or chunks or self._in_flight or only is not None or not self._preempt_one():
                break
        if only is None and len(self.waiting):
            may_seat = self.num_preemptions == preempted_before
            budget = self._budget_for_chunks(len(singles)) - sum(chunks.values())
            self.delays.note(self._seat(budget, chunks, now) if may_seat else "memory", now)
        if len(singles) == 0 and not chunks:
            return None
        return self._compose(singles, chunks)

    def _expire(self, now: float) -> None:
        late = self.waiting.expired(now)
        if self.rows.num_timed:
            order = self.rows.order
            late += self.rows.request_ids[order[self.rows.deadline[order] < now]].tolist()
        for request_id in late:
            self.abort(request_id, "deadline", "The request's deadline passed before it was finished.")

    def _catch_up(self, only: Collection[int] | None) -> tuple[Int64s, dict[int, int]]:
        """Rows that get one token, and longer chunks by row, with blocks in hand for all of it."""
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
        """Active rows that are one token behind, and those further behind; both first in the queue first."""
        rows, order = self.rows, self.rows.order
        if len(order) == 0:
            return order, order
        if only is None and self._steady is not None and self._steady.goes_on(rows):
            return order, order[:0]
        if only is not None:
            order = order[np.isin(order, np.fromiter(only, np.int64, len(only)))]
        known = rows.known[order]
        behind = known - rows.computed[order]
        # A row at its limit has drawn its last token and only waits for it to be confirmed.
        singles = order[(behind == 1) & (known < rows.limit[order])]
        return singles, order[behind > 1]

    def _crossing(self, singles: Int64s) -> Int64s:
        """Those of the rows whose next token needs a block that they do not hold."""
        if len(singles) == 0:
            return singles
        return singles[self.rows.computed[singles] >= self.rows.num_blocks[singles] * self.block_size]

    def _budget_for_chunks(self, num_singles: int) -> int:
        """Tokens for catching up, beside rows that get one. The token budget does not count those rows: prompts that
        fill it exactly would be cut for their sake, and the last few tokens of one would take a step of their own. The
        mixed budget does: it keeps a step that also decodes short, so that streams stay smooth, unless those that wait
        for their first token are many beside them."""
        behind = self._num_behind()
        is_crowd = behind >= CROWD and behind > CROWD_SHARE * num_singles
        if num_singles == 0 or is_crowd or not self._keeps_short:
            return self.token_budget
        # Even a full house leaves some tokens, so that prefills advance beside it.
        return max(self.mixed_budget - num_singles, self.mixed_budget // 4)

    def _num_behind(self) -> int:
        """Requests that have not got their first token: the long steps that streams feel are what those wait for."""
        return len(self.waiting) + self._num_catching_up

    def _chunk(self, row: int, budget: int) -> int:
        """As much of the row as budget and blocks allow, with the blocks taken. Where the budget cuts a prompt, it does
        so at a multiple of the token budget, if one is within reach: the device is prepared for whole chunks."""
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
        """One more block for each of these rows: the part of a steady decode step that is not columns."""
        held, blocks_of, unsent = self.rows.num_blocks[crossing], self.rows.blocks, self._unsent
        rows, columns, taken = crossing.tolist(), held.tolist(), self.pool.take_many(len(crossing))
        for row, block in zip(rows, taken, strict=True):
            blocks_of[row].append(block)
        if unsent:
            known = [at for at, row in enumerate(rows) if row not in unsent]
            rows, columns, taken = ([column[at] for at in known] for column in (rows, columns, taken))
        self._new_blocks.add_each(rows, columns, taken)
        self.rows.num_blocks[crossing] = held + 1

    def _grow(self, row: int, num_blocks: int) -> None:
        blocks, taken = self.rows.blocks[row], self.pool.take_many(num_blocks)
        if row not in self._unsent:
            self._new_blocks.add_many(row, len(blocks), taken)
        blocks += taken
        self.rows.num_blocks[row] = len(blocks)

    # -- seating waiting requests ----------------------------------------------------------------------------------

    def _seat(self, budget: int, chunks: dict[int, int], now: float) -> Cause:
        """Give rows to waiting requests while budget, rows and the forecast of KV memory allow; what ended it.

        Strictly in order, except that a request may pass those that wait for a prefix being computed.
        """
        if budget <= 0:
            return "budget"
        if self.rows.num_free == 0:
            return self._make_way(next(self.waiting.in_order(now)), "rows", now)
        crowd = AdmissionForecast(self.rows, self.pool, self._lengths)
        for request in itertools.islice(self.waiting.in_order(now), HELD_SCAN):
            if budget <= 0:
                return "budget"
            if self.rows.num_free == 0:
                return "rows"
            if self.prefix.is_held(request):
                request.story.held_steps += 1
                continue
            blocks = self.prefix.match(request)
            if self.prefix.must_wait(request, len(blocks)):
                request.story.held_steps += 1
                continue
            if not crowd.join(request, blocks):
                return self._make_way(request, "memory", now)
            self.waiting.remove(request.id)
            row = self._admit(request, blocks, now)
            count = self._chunk(row, budget)
            if count:
                chunks[row] = count
                budget -= count
        return "prefix" if len(self.waiting) else "none"

    def _make_way(self, request: Request, cause: Cause, now: float) -> Cause:
        """Choose a running row to give way to this request when the next step is planned. Not while room from the
        last one is still on its way, and not for one that the queue would not put first."""
        if self._yielding is None and self.rows.num_fenced == 0 and self.pool.num_fenced == 0:
            row = self.policy.giving_way(self.rows, request)
            if row is not None:
                other = self.rows.request(row)
                other.num_output = int(self.rows.known_host[row] - self.rows.num_prompt[row])
                if self.waiting.would_precede(request, other, now):
                    self._yielding = (other.id, f"a request that goes before it found no room ({cause})")
        return cause

    def _give_way(self) -> None:
        if self._yielding is None:
            return
        request_id, why = self._yielding
        self._yielding = None
        row = self._row_of.get(request_id)
        if row is not None and len(self.waiting):
            self.rows.request(row).yields += 1
            self._preempt(row, why)

    def _admit(self, request: Request, blocks: list[int], now: float) -> int:
        self.pool.share(blocks)
        if request.preemptions == 0:
            request.cached_tokens = len(blocks) * self.block_size
            self.delays.note("none", now)
            request.story.waited_for = self.delays.since(request.story.delays_before)
            request.story.diverged_at = self.prefix.divergence(request, len(blocks))
            self._charge(request)
        self.prefix.count(request, len(blocks))
        self.prefix.expect(request, len(blocks))
        request.held_by = None
        row = self.rows.take(request, blocks)
        self._row_of[request.id] = row
        self._unsent.add(row)
        return row

    # -- leaving a row ---------------------------------------------------------------------------------------------

    def _preempt_one(self) -> bool:
        """Send the cheapest row back to the queue, to be recomputed later. The first in the queue always stays."""
        victim = cheapest_victim(self.rows)
        if victim is None:
            return False
        self._preempt(victim, "KV blocks ran out and it was the cheapest to compute again")
        return True

    def _preempt(self, row: int, why: str) -> None:
        request = self._leave(row, "preempted")
        request.preemptions += 1
        self.num_preemptions += 1
        if len(request.story.preempted_for) < MOST_SENTENCES:
            request.story.preempted_for.append(f"after {request.num_output} tokens: {why}")
        self.waiting.add(request)

    # -- what tenants are charged ----------------------------------------------------------------------------------

    def _charge(self, request: Request) -> None:
        """When a request is seated its tenant pays for the prompt and for the output that is expected of it."""
        request.charged = self._lengths.remaining_of_one(0, request.max_tokens)
        num_prompt = request.num_prompt - request.cached_tokens
        self.shares.charge(request.tenant, request.weight, num_prompt, request.charged)

    def _settle(self, request: Request) -> None:
        """When it ends, the difference to what it really generated is made up."""
        if request.charged:
            self.shares.charge(request.tenant, request.weight, 0, request.num_output - request.charged)
        self.shares.leave(request.tenant)

    def _leave(self, row: int, reason: ReleaseReason) -> Request:
        fence = self._next_step - 1 if self._in_flight else None
        self._name_blocks(row, int(self.rows.confirmed[row]) // self.block_size)
        request, blocks = self.rows.release(row, fence)
        self.prefix.forget(request)
        self.pool.give_back(reversed(blocks), fence)
        del self._row_of[request.id]
        self._foreseen = self._foreseen_before = None
        if row in self._unsent:
            self._unsent.discard(row)
        else:
            self._new_blocks.drop(row)
            self._releases.append(Release(row, request.id, reason))
        return request

    def _end(self, request: Request, reason: FinishReason, message: str = "") -> None:
        self._ended.append(end_of(request, reason, request.num_output, message=message))

    # -- composing a plan ------------------------------------------------------------------------------------------

    def _compose(self, singles: Int64s, chunks: dict[int, int]) -> StepPlan:
        rows, steady = self.rows, self._steady
        if steady is not None and singles is steady.order and not chunks:
            return self._repeat(steady)
        table_rows, counts = _columns(singles, chunks)
        starts, known = rows.computed[table_rows], rows.known[table_rows]
        ends = starts + counts
        rows.computed[table_rows] = ends
        # The token about to be drawn is known from here on, although only the device will have it.
        rows.known[table_rows] = np.maximum(known, ends + 1)
        admitted = self._admissions(chunks, singles) if self._unsent else ()
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
        self._steady = repeated_decode_from(plan, singles, rows)
        return plan

    def _repeat(self, steady: RepeatedDecode) -> StepPlan:
        """The next plan of the same rows: what `_compose` would make of them, with the columns that are still true."""
        rows, order, before = self.rows, steady.order, steady.plan
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
        steady.advance(plan)
        return plan

    def _shared_blocks(self, row: int) -> int:
        """Leading blocks of this row that every running row holds. Equal blocks are in equal places, and each is
        held by no fewer rows than the one after it."""
        blocks, everyone = self.rows.blocks[row], self.num_running
        if everyone < 2 or not blocks or self.pool.num_holders(blocks[0]) < everyone:
            return 0
        return bisect_left(blocks, True, key=lambda block: self.pool.num_holders(block) < everyone)

    def _admissions(self, chunks: dict[int, int], singles: Int64s) -> tuple[Admission, ...]:
        """Records for rows of this step that the runner does not know; every block that they hold is new to it."""
        sent = self._unsent & chunks.keys()
        if len(sent) < len(self._unsent):
            sent |= self._unsent.intersection(singles.tolist())
        self._unsent -= sent
        admissions = []
        for row in sorted(sent):
            request = self.rows.request(row)
            self._new_blocks.add_many(row, 0, self.rows.blocks[row])
            admissions.append(Admission(row, request.id, self.rows.tokens(row), request.num_prompt, request.row_params))
        return tuple(admissions)

    # -- apply -----------------------------------------------------------------------------------------------------

    def apply(self, step_no: int, tokens: Int32s) -> StepOutcome:
        """Confirm the oldest launched step. `tokens` are what its sampling rows drew, in plan order."""
        outcome = self.confirm(step_no, tokens)
        self.run_deferred()
        return outcome

    def prepare_outcome(self) -> None:
        """Do what can be done of `confirm` before the tokens are there. For the time in which the device computes."""
        self.run_deferred()
        if self._foreseen is None and self._in_flight:
            self._foreseen = self._make_pending(self._in_flight[0])

    def _make_pending(self, plan: StepPlan) -> PendingOutcome:
        before = self._foreseen_before
        if plan.is_repeated_decode and before is not None and before.lasts:
            return before.next()
        return make_pending_outcome(plan, self.rows)

    def confirm(self, step_no: int, tokens: Int32s) -> StepOutcome:
        """The part of `apply` that somebody waits for: which tokens go to whom, and who has ended."""
        self.run_deferred()
        plan = self._in_flight.popleft()
        if plan.step_no != step_no:
            raise AssertionError(f"step {step_no} completed, but {plan.step_no} is the oldest in flight")
        seen = self._foreseen or self._make_pending(plan)
        self._foreseen, self._foreseen_before = None, seen
        drawn = seen.delivered(tokens)
        stopped = seen.stopped(drawn)
        ended = seen.ends(self.rows, drawn, stopped)
        self._ended += [event for _, event in ended]
        self._untidy = _Untidy(step_no, seen, drawn, ended)
        return self._outcome(step_no, seen, drawn, stopped)

    def run_deferred(self) -> None:
        """What `plan` and `confirm` leave for when nobody waits: blocks get their names, tokens go to where they are
        kept, ended rows leave. Done before anything that could tell the difference."""
        self.prefix.settle()
        if self._untidy is None:
            return
        done, self._untidy = self._untidy, None
        rows, seen = self.rows, done.seen
        rows.confirmed[seen.computed_rows] = seen.computed
        rows.append(seen.table_rows, seen.positions, done.drawn)
        self.pool.complete(done.step_no)
        rows.complete(done.step_no)
        if not seen.repeats:  # the step before has filled the last block of given tokens
            self._name_given_blocks(seen.computed_rows)
        for row, event in done.ended:
            request = self._leave(row, event.reason)
            self._lengths.observe(request.num_output)
            self.policy.learn(request)
            self._settle(request)

    def _name_given_blocks(self, computed_rows: Int64s) -> None:
        """Let blocks of given tokens that this step filled be found at once: others may be waiting for them.

        Generated blocks are named when their row ends, so that a steady decode step pays nothing for them.
        """
        rows = self.rows
        full = np.minimum(rows.confirmed[computed_rows] // self.block_size, rows.num_given[computed_rows])
        for index in np.flatnonzero(full > rows.num_named[computed_rows]).tolist():
            self._name_blocks(int(computed_rows[index]), int(full[index]))

    def _name_blocks(self, row: int, num_full: int) -> None:
        first = int(self.rows.num_named[row])
        self.prefix.name_blocks(self.rows.request(row), first, self.rows.blocks[row][first:num_full])
        self.rows.num_named[row] = num_full

    def _outcome(self, step_no: int, seen: PendingOutcome, drawn: Int32s, stopped: Bools | None) -> StepOutcome:
        request_ids = seen.request_ids
        index = seen.places
        if stopped is not None:  # the token that stops a request is not part of its answer
            delivered = ~stopped
            request_ids, drawn, index = request_ids[delivered], drawn[delivered], index[delivered]
        return StepOutcome(
            step_no=step_no,
            request_ids=request_ids,
            tokens=drawn,
            sample_index=index,
            first_ids=seen.first_ids,
            ended=self.take_ended(),
        )

    def discard_in_flight(self) -> tuple[int, ...]:
        """A launched step failed: forget all that are in flight and send every row to the runner anew.

        Returns the rows of the oldest one that are still active: the culprit is among them.
        """
        self.run_deferred()
        suspects = tuple(row for row in self._in_flight[0].rows.tolist() if self.rows.active[row])
        self._in_flight.clear()
        self._steady = None
        self._foreseen = self._foreseen_before = None
        self.pool.complete(self._next_step)
        self.rows.complete(self._next_step)
        self.rows.rewind()
        self._unsent = set(self._row_of.values())
        self._new_blocks.clear()
        self._releases.clear()
        return suspects


def _columns(singles: Int64s, chunks: dict[int, int]) -> tuple[Int64s, Int32s]:
    """Rows of a step, and how many tokens of each."""
    if not chunks:
        return singles, np.ones(len(singles), np.int32)
    rows, counts = np.array(list(chunks), np.int64), np.array(list(chunks.values()), np.int32)
    if not len(singles):
        return rows, counts
    return np.concatenate([singles, rows]), np.concatenate([np.ones(len(singles), np.int32), counts])
