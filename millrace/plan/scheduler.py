"""The scheduler: in every step, lets `computed` catch up with `known` for all rows, under a token budget.

There is no prefill phase and no decode phase. `plan` gives one token to every row that is one token behind, spends the
token budget on rows further behind, and admits waiting requests with the rest. A step therefore has at most
`token_budget` tokens plus one per row, and places for drafts. `confirm` takes the tokens of the oldest launched step.
No torch, no clock (time is an argument), no randomness.

Its parts: `seating` (rows and their blocks), `choosing` (which rows run), `admitting` (the queue), `preempting`,
`budget`, `drafts`, `composing` (the plan), `confirming` (what a step gave), `repeating` (many steps at once).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from millrace.config import PolicyName
from millrace.params.classes import FinishReason
from millrace.plan.admitting import Admitting
from millrace.plan.budget import StepBudget, StepTarget
from millrace.plan.choosing import Choosing
from millrace.plan.composing import Composer
from millrace.plan.confirming import Confirming
from millrace.plan.drafts import DraftPlaces, DraftSettings
from millrace.plan.figures import figures_of_cache, figures_of_drafts, figures_of_queue
from millrace.plan.in_flight import StepsInFlight
from millrace.plan.kv.block_hash import owner_mark
from millrace.plan.kv.block_pool import BlockPool
from millrace.plan.kv.disk_tier import DiskTierSettings
from millrace.plan.kv.eviction import EvictionSettings
from millrace.plan.kv.groups import ONE_GROUP, KvGroups
from millrace.plan.kv.host_tier import HostTierSettings
from millrace.plan.kv.lower_tiers import LowerTiers
from millrace.plan.kv.prefix import PrefixIndex
from millrace.plan.kv.prefix_tree import PrefixTree
from millrace.plan.kv.retention import Retention, RetentionSettings
from millrace.plan.kv.states.checkpoints import Checkpoints
from millrace.plan.kv.transfer import PrefixTransfer
from millrace.plan.planner.journal import WatchedBlocks
from millrace.plan.planner.protocol import (
    NONE_FORCED,
    BlockMap,
    ChosenRows,
    Forced,
    Forgotten,
    HandleList,
    PlannerFigures,
    RepeatedOutcome,
)
from millrace.plan.preempting import Preempting
from millrace.plan.queue.fair_shares import FairShares
from millrace.plan.queue.kv_peak import OutputLengthEstimate
from millrace.plan.queue.policy import make_policy
from millrace.plan.queue.waiting import WaitingQueue
from millrace.plan.queue.waiting_tokens import WaitingTokens
from millrace.plan.repeating import Repeating
from millrace.plan.request import Request, end_of
from millrace.plan.rows.rows import Rows
from millrace.plan.seating import Seating
from millrace.plan.shapes.choice import ShapeChoice
from millrace.plan.step import (
    BlockCopies,
    Ended,
    Int32s,
    Location,
    StepOutcome,
    StepPlan,
    TrainedDrafts,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    num_blocks: int
    block_size: int
    max_running: int
    token_budget: int
    mixed_budget: int = 0
    """Most tokens of a step that also decodes; 0 = the token budget."""
    target: StepTarget | None = None
    """None: no time limits steps."""
    prefix_cache: bool = True
    expected_output: float = 512.0
    """Tokens of an answer, until some have ended."""
    policy: PolicyName = "fcfs"
    aging_s: float = 30.0
    """Seconds of waiting after which a request is promoted by one priority class."""
    static_batching: bool = False
    groups: KvGroups = ONE_GROUP
    state_slots: int | None = None
    """Checkpoints of recurrent states that are kept. None: the model has no such state."""
    state_bytes: int = 0
    """Of one checkpoint."""
    drafts: DraftSettings = field(default_factory=DraftSettings)
    host_tier: HostTierSettings = field(default_factory=HostTierSettings)
    disk_tier: DiskTierSettings = field(default_factory=DiskTierSettings)
    """Needs a host tier."""
    eviction: EvictionSettings = field(default_factory=EvictionSettings)
    retention: RetentionSettings = field(default_factory=RetentionSettings)


class Scheduler:
    def __init__(self, settings: SchedulerSettings, shapes: ShapeChoice | None = None) -> None:
        """`shapes`: by default every step runs at its own size."""
        groups, self.block_size = settings.groups, settings.block_size
        self.budget = StepBudget(settings.token_budget, settings.mixed_budget, settings.target)
        self.tiers = LowerTiers(settings.host_tier, settings.disk_tier, settings.prefix_cache)
        self.pool = BlockPool(settings.num_blocks, groups.num_groups, self.tiers.indexes, settings.eviction)
        self._has_cache = settings.prefix_cache
        self.rows = Rows(settings.max_running, self.block_size, groups.num_groups)
        self.prefix = PrefixIndex(self.pool, self.block_size, settings.prefix_cache, groups)
        if settings.state_slots is not None:
            num_slots = settings.state_slots if settings.prefix_cache else 0
            hash_of = self.prefix.hash_of
            self.prefix.checkpoints = Checkpoints(num_slots, self.block_size, settings.state_bytes, hash_of)
        self.retention = Retention(settings.retention, self.pool, self.prefix, groups.num_groups)
        self.transfer = PrefixTransfer(self.pool, self.prefix, self.retention, groups)
        columns_per_step = -(-settings.token_budget // self.block_size) + 2 * settings.max_running
        self.tiers.join(self.pool, self.prefix, columns_per_step * groups.num_groups)
        self._in_flight = StepsInFlight()
        self._seating = Seating(self.rows, self.pool, self.prefix, groups, self._in_flight)
        shapes = shapes if shapes is not None else ShapeChoice()
        self.captures = shapes.captures
        self._composer = Composer(self._seating, self._in_flight, shapes)
        self._drafts = DraftPlaces(settings.drafts, self._seating)
        policy = make_policy(settings.policy, self.prefix)
        self.shares = FairShares()
        self.waiting = WaitingQueue(policy, self.shares, settings.aging_s, WaitingTokens(self.prefix))
        lengths = OutputLengthEstimate(initial=settings.expected_output)
        self._admitting = Admitting(
            self._seating, self.waiting, policy, self.shares, self.budget, lengths, self.tiers.load
        )
        self._admitting.is_static = settings.static_batching
        self.num_discarded = 0
        """Tokens computed for requests that ended without a whole answer."""
        self._next_ticket = 0
        self._ended: list[Ended] = []
        self._confirming = Confirming(self._seating, self._in_flight, self._drafts)
        self._preempting = Preempting(self._seating, self.waiting, self._admitting, self._confirming)
        self._choosing = Choosing(
            self._seating,
            self.waiting,
            self.budget,
            self._in_flight,
            composer=self._composer,
            drafts=self._drafts,
            admitting=self._admitting,
            preempting=self._preempting,
        )
        self._repeating = Repeating(
            self._seating, self.budget, self._in_flight, self._composer, self._drafts, self._confirming
        )

    # -- requests --------------------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self._seating)

    @property
    def watched_blocks(self) -> Mapping[Location, WatchedBlocks]:
        found: dict[Location, WatchedBlocks] = {"device": self.pool.named}
        return found | {index.location: index for index in self.tiers.indexes}

    @property
    def has_drafts(self) -> bool:
        """False if no step ever has drafts."""
        return self._drafts.is_on

    @property
    def num_preemptions(self) -> int:
        return self._preempting.num_preemptions

    @property
    def num_yields(self) -> int:
        return self._preempting.num_yields

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def has_work(self) -> bool:
        return bool(len(self._seating) or len(self.waiting) or self._ended)

    def submit(self, request: Request) -> None:
        request.ticket = self._next_ticket
        self._next_ticket += 1
        request.prompt = np.ascontiguousarray(request.prompt, np.int32)
        request.history = bytearray(request.prompt.data)
        request.history += request.output
        if why := self._seating.why_it_never_fits(request):
            self._end(request, "error", why)
            return
        if request.draws and request.num_output >= request.max_tokens:  # It came with its whole answer.
            self._end(request, "length")
            return
        request.diagnostics.num_ahead = len(self.waiting)
        request.diagnostics.delays_before = self._admitting.delays.totals()
        if request.retain is not None and self._has_cache:
            self.retention.keep(request, request.retain, request.arrival)
            if request.retain.is_required and request.diagnostics.refused:
                self._end(request, "error", request.diagnostics.refused)
                return
        self.shares.enter(request.holder)
        self.waiting.add(request)

    def abort(self, request_id: int, reason: FinishReason = "abort", message: str = "") -> bool:
        """End a waiting or running request. False if there is none with this id."""
        self.run_deferred()
        row = self._seating.row_of(request_id)
        if row is not None:
            request = self._preempting.release(row, reason)
        elif request_id in self.waiting:
            request = self.waiting.remove(request_id)
        else:
            return False
        self._admitting.settle(request)
        self._end(request, reason, message)
        return True

    def take_ended(self) -> tuple[Ended, ...]:
        """Terminal events since the last call, each returned once."""
        ended, self._ended = tuple(self._ended), []
        return ended

    def append_forced(self, request_id: int, forced: Sequence[int]) -> int:
        """The grammar of a running request allows only these tokens next, one after the other. The first is drawn by
        the step launched last; the others need no draw. Returns how many draws that saves."""
        self.run_deferred()
        row, rows = self._seating.row_of(request_id), self.rows
        if row is None or row in rows.appended or not rows.request(row).can_jump:
            return 0
        known = int(rows.known[row])
        if known != rows.known_host[row] + 1 or rows.computed[row] != known - 1 or rows.slack[row]:
            return 0  # No step in flight draws for it, or several do.
        end_token_ids = rows.request(row).end_token_ids
        end = next((at for at, token in enumerate(forced) if token in end_token_ids), len(forced))
        # The last token that the limit allows is drawn: it ends the request.
        tokens = np.array(forced[: min(end, int(rows.limit[row]) - known)], np.int32)
        if len(tokens) < 2:
            return 0
        self._confirming.forget()
        self._seating.append(row, tokens)
        return len(tokens) - 1

    # -- handles ---------------------------------------------------------------------------------------------------

    def handles(self, owner: str | None, now: float) -> HandleList:
        """Prefixes that are kept cached, of this owner (None: of all)."""
        below: dict[str, set[bytes]] = {index.location: set(index.digests()) for index in self.tiers.indexes}
        return self.retention.listed(owner, now, below)

    def renew_handle(self, name: str, owner: str, ttl_s: float, now: float) -> int:
        return self.retention.renew(name, owner, ttl_s, now)

    def copy_handle(self, name: str, owner: str, new_name: str, now: float) -> int:
        return self.retention.copy(name, owner, new_name, now)

    def drop_handles(self, name: str, owner: str | None) -> int:
        """End the handles with this name. Returns how many there were."""
        return self.retention.drop(name, owner)

    def block_map(self, max_nodes: int, now: float) -> BlockMap:
        self.run_deferred()
        return PrefixTree(self.pool, self.tiers.indexes, self.prefix, now).shown(max_nodes)

    def forget(self, owner: str, salt: str = "") -> Forgotten:
        """The owner's requests have been aborted: its handles end, and nobody finds its own blocks any longer."""
        self.run_deferred()
        mark, num_handles = owner_mark((salt or owner).encode()), self.retention.forget(owner)
        if self.prefix.checkpoints is not None:
            self.prefix.checkpoints.slots.forget(mark)
        blocks: dict[str, int] = {"device": self.pool.forget(mark)}
        return Forgotten(mark, num_handles, blocks | self.tiers.forget(mark))

    # -- copies between locations ----------------------------------------------------------------------------------

    def take_copies(self) -> list[BlockCopies]:
        """Copies to start now, beside the steps. Call it after every `plan`, also if that returned None."""
        return self.tiers.take_copies()

    def settle(self, now: float) -> None:
        """No request will run any more: `take_copies` moves cached blocks to where they outlive the process."""
        self.tiers.advance(now, is_idle=True)

    def copies_done(self, copies: BlockCopies, failed: bool, seconds: float = 0.0) -> None:
        """The copies have ended. Blocks that failed to arrive are computed; those that failed to leave are lost.
        `seconds`: how long they took, without waiting for their turn."""
        self.tiers.copies_done(copies, failed, seconds)

    @property
    def num_copies(self) -> int:
        """Copies to and from the device in flight: batches that `copies_done` has not been called for."""
        return self.tiers.num_near

    # -- plan ------------------------------------------------------------------------------------------------------

    def plan(self, now: float, *, only: Collection[int] | None = None, forced: Forced = NONE_FORCED) -> StepPlan | None:
        """The next step, or None if nothing can be computed before a step in flight completes.

        `only` limits the step to these rows and admits nothing: used to find the request that made a step fail.
        `forced` become drafts of rows that have places.
        """
        chosen = self.choose(now, only=only)
        return None if chosen is None else self._composer.compose(chosen, forced)

    def compose(self, chosen: ChosenRows, forced: Forced = NONE_FORCED) -> StepPlan:
        """The plan of the rows chosen last. Nothing else may happen in between."""
        return self._composer.compose(chosen, forced)

    def choose(self, now: float, *, only: Collection[int] | None = None) -> ChosenRows | None:
        """The first part of `plan`, for which masks need not be known."""
        self.run_deferred()
        self._expire(now)
        self.pool.named.uses.now = now
        self.retention.advance(now)
        self.tiers.advance(now, is_idle=not len(self._seating) and not len(self.waiting))
        return self._choosing.choose(now, only)

    def _expire(self, now: float) -> None:
        late = self.waiting.expired(now)
        if self.rows.num_timed:
            order = self.rows.order
            late += self.rows.request_ids[order[self.rows.deadline[order] < now]].tolist()
        for request_id in late:
            self.abort(request_id, "deadline", "The deadline of the request passed before it finished.")

    # -- many steps at once ----------------------------------------------------------------------------------------

    def repeats_ahead(self) -> tuple[StepPlan, int] | None:
        """The last plan, and how many steps after it will only decode the same rows as long as nobody comes, goes or
        draws an end token. None: at most one."""
        is_busy = len(self.waiting) or self._ended or self.num_copies
        return None if is_busy else self._repeating.ahead()

    def repeat(self, tokens: Int32s) -> RepeatedOutcome:
        """As many steps as there are rows in `tokens`, at most `repeats_ahead`: each is planned and launched, and the
        oldest in flight confirmed. `tokens` [steps, rows] are those of the confirmed ones."""
        return self._repeating.repeat(tokens)

    def observe_repeated(self, last: StepPlan, seconds: Sequence[float]) -> None:
        """`observe_step` for steps of which `last` is the last one."""
        self.budget.observe_repeated(last, seconds)

    # -- figures ---------------------------------------------------------------------------------------------------

    def observe_step(self, plan: StepPlan, seconds: float) -> None:
        """A completed step occupied the device for this long."""
        self.budget.observe(plan, seconds)
        self._drafts.observe_time(plan, seconds)

    def observe_speed(self, tokens_per_s: float) -> None:
        """Throughput of full steps; 0 until measured."""
        if self.tiers.host is not None:
            self.tiers.host.prefill_tokens_per_s = tokens_per_s

    def figures(self, now: float) -> PlannerFigures:
        return PlannerFigures(
            **figures_of_queue(self._seating, self.waiting, self._preempting, now),
            **figures_of_cache(self.pool, self.prefix),
            **self.tiers.figures(),
            **figures_of_drafts(self._drafts.state),
            graphs_left=self.captures.num_left,
            discarded_tokens=self.num_discarded,
            retentions_refused=self.retention.num_refused,
        )

    def check_sums(self) -> None:
        """Raises if the pool equation does not hold."""
        self.pool.check_sums()
        if self.prefix.checkpoints is not None:
            self.prefix.checkpoints.slots.check()

    def _end(self, request: Request, reason: FinishReason, message: str = "") -> None:
        if reason not in ("stop", "length"):
            self.num_discarded += max(0, request.num_computed - request.cached_tokens)
        self._ended.append(end_of(request, reason, request.num_output, message=message))

    # -- confirm ---------------------------------------------------------------------------------------------------

    def apply(self, step_no: int, tokens: Int32s, counts: Int32s | None = None) -> StepOutcome:
        """Confirm the oldest launched step, bookkeeping included."""
        outcome = self.confirm(step_no, tokens, counts)
        self.run_deferred()
        return outcome

    def prepare_outcome(self) -> None:
        """Compute the pending outcome of the oldest step in flight. Call it while the device runs the step."""
        self.run_deferred()
        self._confirming.prepare()

    def confirm(
        self,
        step_no: int,
        tokens: Int32s,
        counts: Int32s | None = None,
        num_drafts: Int32s | None = None,
        trained: TrainedDrafts | None = None,
    ) -> StepOutcome:
        """The urgent part of `apply`: which request gets which tokens, and which requests have ended.

        `tokens` were drawn by the step's sampling rows, in plan order; `counts` says how many by each row of a step
        with drafts, and `num_drafts` how many drafts each had, if the runner knows; `trained`: those of them that a
        trained drafter proposed beside drafts from text.
        """
        self.run_deferred()
        delivered, num_appended = self._confirming.confirm(step_no, tokens, counts, num_drafts, trained)
        self._ended += [event for _, event in delivered.ended]
        return StepOutcome(
            step_no=step_no,
            request_ids=delivered.request_ids,
            tokens=delivered.tokens,
            sample_index=delivered.sample_index,
            first_ids=delivered.first_ids,
            ended=self.take_ended(),
            num_appended=num_appended,
        )

    def run_deferred(self) -> None:
        """Do the bookkeeping that `plan` and `confirm` deferred: hash and register blocks, store tokens, release rows
        of ended requests. Every method that depends on it calls this first."""
        self.prefix.hash_expected()
        for row, event in self._confirming.run_deferred():
            request = self._preempting.release(row, event.reason)
            if request.retain is not None and request.retain.covers_answer:
                self.retention.keep_answer(request)
            self._admitting.learn(request)

    def discard_in_flight(self) -> tuple[int, ...]:
        """A launched step failed: discard all steps in flight and announce every row to the runner again.

        Returns the active rows of the oldest step. One of them caused the failure.
        """
        self.run_deferred()
        oldest = self._in_flight.oldest
        suspects = tuple(row for row in oldest.rows.tolist() if self.rows.active[row]) if oldest is not None else ()
        first_lost = self._in_flight.next_step if oldest is None else oldest.step_no
        self._in_flight.clear()
        self._composer.forget()
        self._confirming.forget()
        self.pool.complete(self._in_flight.next_step)
        self.rows.complete(self._in_flight.next_step)
        self.rows.rewind()
        self._seating.documents.rewind(first_lost)
        self._seating.announce_all_again()
        return suspects
