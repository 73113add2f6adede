"""The planner of encoders: batches of whole texts under a token budget, without a KV cache.

A text is computed in one step and ends with it, so a row lives for one step. Texts keep the queue's order: priority
class, the tenant's fair share, arrival. A text longer than the budget runs alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from millrace.params.classes import FinishReason
from millrace.plan.encoding.rows import EncodeRows
from millrace.plan.in_flight import StepsInFlight
from millrace.plan.planner.journal import WatchedBlocks
from millrace.plan.planner.protocol import (
    NO_HANDLES,
    NONE_FORCED,
    BlockMap,
    ChosenRows,
    Forced,
    Forgotten,
    HandleList,
    PlannerFigures,
)
from millrace.plan.queue.delays import Cause, Delays
from millrace.plan.queue.fair_shares import FairShares
from millrace.plan.queue.policy import FirstCome
from millrace.plan.queue.waiting import WaitingQueue
from millrace.plan.queue.waiting_tokens import WholePrompts
from millrace.plan.request import NUM_CLASSES, Request, end_of
from millrace.plan.shapes.captures import Captures
from millrace.plan.step import (
    Admission,
    BlockCopies,
    Ended,
    Int32s,
    Location,
    Release,
    StepOutcome,
    StepPlan,
    TrainedDrafts,
    exact_shape,
)

_NONE = np.zeros(0, np.int32)
_NO_IDS = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeSettings:
    max_rows: int
    """Texts that steps in flight hold together."""
    token_budget: int
    """Tokens of one step, unless a single text is longer."""
    max_tokens: int
    """Of one text."""
    aging_s: float = 30.0


class EncodePlanner:
    has_drafts = False

    def __init__(self, settings: EncodeSettings) -> None:
        self._settings = settings
        self.rows = EncodeRows(settings.max_rows)
        self.captures = Captures((), (), enabled=False)
        self._shares, self._delays = FairShares(), Delays()
        self._waiting = WaitingQueue(FirstCome(), self._shares, settings.aging_s, WholePrompts())
        self._in_flight = StepsInFlight()
        self._unannounced: dict[int, None] = {}
        """Rows that no step in flight computes and no plan announced, in order: after a failed step."""
        self._fenced: list[tuple[int, int]] = []
        """Rows released during a step in flight, each with the last step launched by then."""
        self._released: list[Release] = []
        self._ended: list[Ended] = []
        self._next_ticket = 0

    @property
    def has_work(self) -> bool:
        return bool(self.rows.requests or len(self._waiting) or self._ended)

    @property
    def watched_blocks(self) -> Mapping[Location, WatchedBlocks]:
        return {}

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    # -- requests --------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        request.ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
        if request.num_prompt > self._settings.max_tokens:
            message = f"The text has {request.num_prompt} tokens; this model reads at most {self._settings.max_tokens}."
            self._ended.append(end_of(request, "error", 0, message=message))
            return
        if not request.pools:
            self._ended.append(end_of(request, "error", 0, message="This model reads texts and writes none."))
            return
        request.diagnostics.num_ahead, request.diagnostics.has_cache = len(self._waiting), False
        request.diagnostics.delays_before = self._delays.totals()
        self._shares.enter(request.holder)
        self._waiting.add(request)

    def abort(self, request_id: int, reason: FinishReason = "abort", message: str = "") -> bool:
        row = self.rows.row_of.get(request_id)
        if row is not None:
            request = self._release(row, reason)
        elif request_id in self._waiting:
            request = self._waiting.remove(request_id)
        else:
            return False
        self._shares.leave(request.holder)
        self._ended.append(end_of(request, reason, 0, message=message))
        return True

    def take_ended(self) -> tuple[Ended, ...]:
        ended, self._ended = tuple(self._ended), []
        return ended

    def append_forced(self, request_id: int, forced: Sequence[int]) -> int:
        return 0

    # -- steps -----------------------------------------------------------------------------------------------------

    def choose(self, now: float, *, only: Collection[int] | None = None) -> ChosenRows | None:
        late = [request.id for request in self.rows.requests.values() if request.deadline < now]
        for request_id in [*late, *self._waiting.expired(now)]:
            self.abort(request_id, "deadline", "The deadline of the request passed before it finished.")
        rows = self._again(only)
        if only is None:
            rows += self._admit(now, sum(self.rows.requests[row].num_prompt for row in rows))
        if not rows:
            return None
        return ChosenRows(_NO_IDS, {row: self.rows.requests[row].num_prompt for row in rows})

    def plan(self, now: float, *, only: Collection[int] | None = None) -> StepPlan | None:
        chosen = self.choose(now, only=only)
        return None if chosen is None else self.compose(chosen)

    def _again(self, only: Collection[int] | None) -> list[int]:
        """Rows whose step failed, as many as one step takes."""
        rows: list[int] = []
        num_tokens = 0
        for row in list(self._unannounced) if self._unannounced else ():
            length = self.rows.requests[row].num_prompt
            if only is not None and row not in only:
                continue
            if rows and num_tokens + length > self._settings.token_budget:
                break
            rows.append(row)
            num_tokens += length
            del self._unannounced[row]
        return rows

    def _admit(self, now: float, num_tokens: int) -> list[int]:
        """Give rows to waiting texts within the budget, of which `num_tokens` are taken."""
        rows: list[int] = []
        cause: Cause = "none"
        for request in self._waiting.in_order(now) if len(self._waiting) else ():
            if not self.rows.free:
                cause = "rows"
                break
            if num_tokens and num_tokens + request.num_prompt > self._settings.token_budget:
                cause = "budget"
                break
            self._waiting.remove(request.id)
            self._delays.note("none", now)
            request.diagnostics.waited_for = self._delays.since(request.diagnostics.delays_before)
            self._shares.charge(request.holder, request.weight, request.num_prompt, 0)
            rows.append(self.rows.take(request))
            num_tokens += request.num_prompt
        self._delays.note(cause, now)
        return rows

    def compose(self, chosen: ChosenRows, forced: Forced = NONE_FORCED) -> StepPlan:
        rows = list(chosen.chunks)
        requests = [self.rows.requests[row] for row in rows]
        counts = np.array([request.num_prompt for request in requests], np.int32)
        released, self._released = tuple(self._released), []
        plan = StepPlan(
            step_no=self._in_flight.next_step,
            rows=np.array(rows, np.int32),
            starts=np.zeros(len(rows), np.int32),
            counts=counts,
            samples=np.zeros(len(rows), np.bool_),
            block_rows=_NONE,
            block_cols=_NONE,
            block_ids=_NONE,
            shape=exact_shape(counts),
            admitted=tuple(
                Admission(row, request.id, request.prompt, request.num_prompt, request.row_params, request.limit)
                for row, request in zip(rows, requests, strict=True)
            ),
            released=released,
            pooled=np.ones(len(rows), np.bool_),
        )
        self._in_flight.launch(plan)
        return plan

    def prepare_outcome(self) -> None: ...

    def run_deferred(self) -> None: ...

    def confirm(
        self,
        step_no: int,
        tokens: Int32s,
        counts: Int32s | None = None,
        num_drafts: Int32s | None = None,
        trained: TrainedDrafts | None = None,
    ) -> StepOutcome:
        plan = self._in_flight.complete(step_no)
        ids = [admission.request_id for admission in plan.admitted]
        done = [row for row, one in zip(plan.rows.tolist(), ids, strict=True) if self.rows.row_of.get(one) == row]
        requests = [self._release(row, "stop") for row in done]
        self._unfence(step_no)
        for request in requests:
            self._shares.leave(request.holder)
            self._ended.append(end_of(request, "stop", 0))
        return StepOutcome(
            step_no=step_no,
            request_ids=_NO_IDS,
            tokens=_NONE,
            sample_index=_NO_IDS,
            first_ids=np.array([request.id for request in requests], np.int64),
            ended=self.take_ended(),
        )

    def discard_in_flight(self) -> tuple[int, ...]:
        oldest = self._in_flight.oldest
        suspects = [] if oldest is None else oldest.rows.tolist()
        self._in_flight.clear()
        self._unfence(self._in_flight.next_step)
        self._unannounced = dict.fromkeys(self.rows.requests)
        return tuple(row for row in suspects if row in self.rows.requests)

    def _release(self, row: int, reason: FinishReason) -> Request:
        request = self.rows.release(row)
        self._unannounced.pop(row, None)
        self._released.append(Release(row, request.id, reason))
        fence = self._in_flight.fence
        if fence is None:
            self.rows.free.append(row)
        else:
            self._fenced.append((row, fence))
        return request

    def _unfence(self, step_no: int) -> None:
        """All steps up to this one have completed."""
        self.rows.free += [row for row, fence in self._fenced if fence <= step_no]
        self._fenced = [entry for entry in self._fenced if entry[1] > step_no]

    # -- copies, figures -------------------------------------------------------------------------------------------

    def take_copies(self) -> list[BlockCopies]:
        return []

    def copies_done(self, copies: BlockCopies, failed: bool, seconds: float = 0.0) -> None:
        raise AssertionError("an encoder has no blocks to copy")

    def observe_step(self, plan: StepPlan, seconds: float) -> None: ...

    def handles(self, owner: str | None, now: float) -> HandleList:
        return NO_HANDLES

    def renew_handle(self, name: str, owner: str, ttl_s: float, now: float) -> int:
        return 0

    def copy_handle(self, name: str, owner: str, new_name: str, now: float) -> int:
        return 0

    def drop_handles(self, name: str, owner: str | None) -> int:
        return 0

    def block_map(self, max_nodes: int, now: float) -> BlockMap | None:
        return None

    def forget(self, owner: str, salt: str = "") -> Forgotten:
        return Forgotten(b"")

    def settle(self, now: float) -> None: ...

    def observe_speed(self, tokens_per_s: float) -> None: ...

    def figures(self, now: float) -> PlannerFigures:
        waiting, again = self._waiting, [0] * NUM_CLASSES
        for row in self._unannounced:
            request = self.rows.requests[row]
            again[request.priority] += request.num_prompt
        return PlannerFigures(
            running=len(self.rows.requests),
            waiting=len(waiting),
            rows_free=len(self.rows.free),
            waiting_by_class=tuple(waiting.num_by_class),
            waiting_tokens=waiting.tokens.by_class(),
            running_prefill_tokens=tuple(again),
            aged_by_class=waiting.num_aged(now),
        )

    def check_sums(self) -> None:
        """Every row is free, taken or waits for the end of a step."""
        num_rows = len(self.rows.free) + len(self.rows.requests) + len(self._fenced)
        if num_rows != self.rows.capacity or len(self.rows.row_of) != len(self.rows.requests):
            raise AssertionError(f"{num_rows} rows are accounted for; there are {self.rows.capacity}")
