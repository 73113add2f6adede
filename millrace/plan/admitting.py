"""Admits waiting requests to free rows, as far as the step's budget and the forecast of KV memory allow."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from millrace.plan.budget import ChunkBudget, StepBudget
from millrace.plan.documents.placing import Span
from millrace.plan.kv.host_tier import Loading
from millrace.plan.kv.prefix import Match
from millrace.plan.queue.admission_forecast import AdmissionForecast
from millrace.plan.queue.delays import Cause, Delays
from millrace.plan.queue.fair_shares import FairShares
from millrace.plan.queue.kv_peak import OutputLengthEstimate
from millrace.plan.queue.policy import Policy
from millrace.plan.queue.waiting import WaitingQueue
from millrace.plan.request import BATCH, Request
from millrace.plan.seating import Seating

MAX_HELD_SCAN = 256
"""Maximum number of waiting requests examined per step: many may wait for a prefix that is being computed."""


class Admitting:
    def __init__(
        self,
        seating: Seating,
        waiting: WaitingQueue,
        policy: Policy,
        shares: FairShares,
        budget: StepBudget,
        lengths: OutputLengthEstimate,
        load: Callable[[Request, Match], Loading] = lambda *_: "none",
    ) -> None:
        self._seating, self._rows, self._pool, self._prefix = seating, seating.rows, seating.pool, seating.prefix
        self._waiting, self._policy, self._shares, self._budget = waiting, policy, shares, budget
        self._lengths, self._load = lengths, load
        self.delays = Delays()
        self.is_static = False
        """True with static batching: a batch is gathered only when the one before has ended."""
        self._is_gathering = False
        self._chosen_victim: tuple[int, str] | None = None
        """The running request to preempt before the next step, and why."""

    def admit(self, budget: ChunkBudget, chunks: dict[int, int], now: float) -> None:
        """Admit requests, with their first tokens added to `chunks`, and note what the others wait for."""
        if self.is_static and not (self._is_gathering or self._rows.num_active == 0):
            self.delays.note("rows", now)
            return
        cause = self._admit_waiting(budget, chunks, now)
        self._is_gathering = cause == "budget" and self._rows.num_free > 0  # Else the batch is complete.
        self.delays.note(cause, now)

    def _admit_waiting(self, budget: ChunkBudget, chunks: dict[int, int], now: float) -> Cause:
        """Admit waiting requests while budget, free rows and the admission forecast allow. Returns what stopped it.

        Strictly in queue order, except that a request may overtake others that wait for a prefix being computed or
        arriving from host memory, or whose class has no budget left in this step.
        """
        if budget.tokens <= 0:
            return "budget"
        if self._rows.num_free == 0:
            return "rows"
        seating = self._seating
        self._prefix.begin_admitting()
        forecast = AdmissionForecast(self._rows, self._pool, seating.groups, self._lengths, seating.most_blocks)
        least_urgent = BATCH if budget.left(BATCH) > 0 else budget.urgent
        cause: Cause = "prefix" if least_urgent == BATCH else "budget"
        for request in itertools.islice(self._waiting.in_order(now, least_urgent), MAX_HELD_SCAN):
            if budget.tokens <= 0:
                return "budget"
            if self._rows.num_free == 0:
                return "rows"
            left = budget.left(request.priority)
            if left <= 0:
                cause = "budget"
                continue
            if self._prefix.is_held(request):
                continue
            match = self._prefix.match(request)
            if self._prefix.must_wait(request, match) or seating.documents.must_wait(request):
                continue
            if not forecast.admit(request, match):
                return self._choose_victim(request, "memory", now)
            loading = self._load(request, match)
            if loading == "blocked":
                return "memory" if self._pool.num_soon else self._choose_victim(request, "memory", now)
            if loading == "started":
                continue
            self._waiting.remove(request.id)
            row = self._seat(request, match, now)
            count = self._budget.chunk(self._seating, row, left)
            if count:
                chunks[row] = count
                budget.take(request.priority, count)
        return cause if len(self._waiting) else "none"

    def _seat(self, request: Request, match: Match, now: float) -> int:
        spans, expected = self._spans(request, match), self._lengths.expected(request)
        if request.preemptions == 0:
            request.placed_tokens = sum(span.end - span.start for span in spans)
            request.cached_tokens = min(match.num_columns * self._rows.block_size, request.num_prompt)
            self.delays.note("none", now)
            request.diagnostics.waited_for = self.delays.since(request.diagnostics.delays_before)
            self._prefix.note_divergence(request, match)
            self._charge(request, expected)
        row = self._seating.admit(request, match, spans)
        self._rows.expected[row] = expected
        return row

    def _spans(self, request: Request, match: Match) -> list[Span]:
        """Of documents, as far as there are blocks for them now: the others are computed as blocks become free."""
        spans = self._seating.documents.find(request, match)
        if not spans:
            return spans
        held = match.found + [block for span in spans for block in span.blocks]
        num_left = self._seating.num_available_columns - self._pool.num_unreferenced(held)
        while spans and -(-spans[-1].end // self._rows.block_size) - match.num_columns > num_left:
            spans.pop()
        return spans

    def _choose_victim(self, request: Request, cause: Cause, now: float) -> Cause:
        """Choose a running request to preempt for this one before a step is planned. Returns `cause`.

        Chooses none while fenced rows or blocks are about to become free, nor one that would precede this request.
        """
        if self._chosen_victim is None and self._rows.num_fenced == 0 and self._pool.num_fenced == 0:
            row = self._policy.victim_for(self._rows, request)
            if row is not None:
                other = self._rows.request(row)
                other.num_output = int(self._rows.known_host[row] - self._rows.num_prompt[row])
                if self._waiting.would_precede(request, other, now):
                    self._chosen_victim = (other.id, f"a more urgent request could not be admitted ({cause})")
        return cause

    def take_victim(self, now: float) -> tuple[int, str] | None:
        """The row to preempt now for a waiting request, and why."""
        if len(self._waiting) and self._rows.num_free == 0 and not self.is_static:
            self._choose_victim(next(self._waiting.in_order(now)), "rows", now)
        chosen, self._chosen_victim = self._chosen_victim, None
        if chosen is None or not len(self._waiting):
            return None
        row = self._seating.row_of(chosen[0])
        return None if row is None else (row, chosen[1])

    # -- fair shares -----------------------------------------------------------------------------------------------

    def _charge(self, request: Request, expected: float) -> None:
        """On admission, charge the share for the prompt and the expected output."""
        request.charged = self._lengths.remaining_of_one(0, request.max_tokens, expected)
        num_prompt = request.num_prompt - request.cached_tokens
        self._shares.charge(request.holder, request.weight, num_prompt, request.charged)

    def settle(self, request: Request) -> None:
        """At the end, correct the charge to the actual output."""
        if request.charged:
            self._shares.charge(request.holder, request.weight, 0, request.num_output - request.charged)
        self._shares.leave(request.holder)

    def learn(self, request: Request) -> None:
        """A request ended on its own: its length tells about those to come."""
        now = self._pool.named.uses.now
        self._lengths.observe(request, now)
        self._policy.learn(request, now)
        self.settle(request)
