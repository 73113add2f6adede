"""What the engine asks of a planner: `Scheduler` is the one with a KV cache; an encoder's has none.

A planner decides what each step computes. It has no clock (time is an argument), knows no device, and is called by one
thread at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from millrace.params.classes import FinishReason
from millrace.plan.planner.journal import WatchedBlocks
from millrace.plan.request import NUM_CLASSES, Request
from millrace.plan.shapes.captures import Captures
from millrace.plan.step import (
    BlockCopies,
    Bools,
    Ended,
    Int32s,
    Int64s,
    Location,
    StepOutcome,
    StepPlan,
    TrainedDrafts,
    TrainedPlaces,
)

NO_TOKENS = (0,) * NUM_CLASSES


Forced = Mapping[int, Sequence[int]]
"""By request: the only tokens that its grammar allows after those of the steps in flight."""
NONE_FORCED: Forced = MappingProxyType({})


@dataclass(slots=True)  # Never modified, but a frozen dataclass takes several times as long to create.
class ChosenRows:
    """The rows of the next step, with their blocks and places: all of its plan but what grammars force."""

    singles: Int64s
    """Rows that get one token each."""
    chunks: dict[int, int]
    """Tokens of the other rows."""
    drafts: Int32s | None = None
    """Places for drafts of each of `singles`. This and the others: see `StepPlan`."""
    draft_floor: float = 0.0
    trained: TrainedPlaces | None = None
    trained_rests: bool = False

    @property
    def longest(self) -> int:
        return max(self.chunks.values()) if self.chunks else 1


class RunningRows(Protocol):
    """The running requests, by table row. Only the planner writes these columns."""

    @property
    def capacity(self) -> int: ...
    @property
    def active(self) -> Bools: ...
    @property
    def request_ids(self) -> Int64s:
        """A row that was released keeps its request's id until it is given away."""

    @property
    def priority(self) -> Int32s: ...
    @property
    def classes(self) -> Collection[int]:
        """Priority classes of all requests so far."""

    @property
    def num_constrained(self) -> int:
        """Active rows with a grammar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerFigures:
    """Counters and gauges, each as `EngineStats` has it under the same name."""

    running: int
    waiting: int
    rows_free: int
    waiting_by_class: tuple[int, ...]
    waiting_tokens: tuple[int, ...] = NO_TOKENS
    running_prefill_tokens: tuple[int, ...] = NO_TOKENS
    aged_by_class: tuple[int, ...] = NO_TOKENS
    graphs_left: int = 0
    preemptions: int = 0
    yields: int = 0
    recomputed_tokens: int = 0
    discarded_tokens: int = 0
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0
    prefix_hit_tokens: int = 0
    prefix_query_tokens: int = 0
    evictions: int = 0
    evicted_for_arrivals: int = 0
    evicted_retained: int = 0
    blocks_retained: int = 0
    retentions_refused: int = 0
    state_slots_total: int = 0
    state_slots_used: int = 0
    state_slot_bytes: int = 0
    state_hits: int = 0
    state_evictions: int = 0
    host_blocks_total: int = 0
    host_blocks_used: int = 0
    host_tokens_loaded: int = 0
    host_copies_failed: int = 0
    host_blocks_lost: int = 0
    disk_blocks_total: int = 0
    disk_blocks_used: int = 0
    disk_blocks_written: int = 0
    disk_tokens_read: int = 0
    disk_copies_failed: int = 0
    disk_blocks_lost: int = 0
    evictions_below: dict[str, dict[str, int]] = field(default_factory=dict)
    draft_length: int = 0
    draft_probes: int = 0
    draft_stops: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HandleFigures:
    """A prefix that is kept cached."""

    name: str
    owner: str
    tokens: int
    resident_tokens: int
    """Those of them, from the first on, that need not be computed now."""
    bytes: int
    age_s: float
    ttl_s: float
    expires_in_s: float
    is_hint: bool
    locations: dict[str, int]
    """Tokens by the nearest location that has their block."""


@dataclass(frozen=True, slots=True)
class HandleList:
    handles: list[HandleFigures]
    used_bytes: int
    max_bytes: int
    """That all owners' handles may keep together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixNode:
    """Cached blocks that follow each other without a branch, all in one state."""

    id: str
    """The beginning of the first one's hash."""
    parent: int
    """Which node it follows, by its place in the list; -1 for none."""
    owner: str
    """A hash of the tenant's name; empty if several tenants may share the blocks."""
    start: int | None
    """Tokens before it; None if what came before was evicted."""
    tokens: int
    location: str
    """The nearest that has the blocks."""
    state: str
    refs: int
    """Running requests that use it."""
    hits: int
    """Requests that found it since it came to the device."""
    idle_s: float | None
    """Seconds since it was filled or found; None if it is not on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMap:
    """What is cached, in a bounded size."""

    states: dict[str, dict[str, int]]
    """By location, all blocks by their state."""
    nodes: list[PrefixNode]
    """Those with most tokens under them; parents come before their children."""
    other_nodes: int
    other_tokens: int
    """Of nodes that were left out."""
    tokens: int
    """Of all nodes."""
    is_whole: bool
    """False if more is cached than was looked at."""


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What was dropped of an owner."""

    mark: bytes
    """In the names of its blocks."""
    handles: int = 0
    blocks: Mapping[str, int] = field(default_factory=dict)
    """By location."""


NO_HANDLES = HandleList([], 0, 0)


class Planner(Protocol):
    """An implementation must hold this:

    - Every submitted request ends exactly once, in the `ended` of an outcome or in `take_ended`.
    - Steps are numbered from one plan to the next and confirmed in that order. Several may be in flight.
    - A plan is never modified after `plan` returned it.
    - A row is given to another request only when all steps launched before its release have completed.
    - After `discard_in_flight` the first plan of each running request announces it again, and computes what was lost.
      Releases from before may be missing: an admission replaces what its row held.
    - Work that nobody waits for is deferred to `run_deferred`; every method that depends on it calls that first.
    """

    @property
    def rows(self) -> RunningRows: ...
    @property
    def captures(self) -> Captures:
        """Graphs to capture while the engine is idle."""

    @property
    def has_work(self) -> bool:
        """True if a request waits or runs, or an end was not taken yet."""

    @property
    def has_drafts(self) -> bool:
        """False if no step ever has drafts."""

    @property
    def watched_blocks(self) -> Mapping[Location, WatchedBlocks]:
        """The cached blocks by tier, for those who are told of changes. Empty without a KV cache."""

    @property
    def num_in_flight(self) -> int:
        """Steps planned and not confirmed yet."""

    # -- requests

    def submit(self, request: Request) -> None:
        """The request waits for its turn. One that can never run ends with an error."""

    def abort(self, request_id: int, reason: FinishReason = "abort", message: str = "") -> bool:
        """End a waiting or running request. False if there is none with this id."""

    def take_ended(self) -> tuple[Ended, ...]:
        """Terminal events since the last call, each returned once."""

    def append_forced(self, request_id: int, forced: Sequence[int]) -> int:
        """The grammar of a running request allows only these tokens next. The first is drawn by the step launched last;
        the others need no draw. Returns how many draws that saves; 0 if it cannot."""

    # -- steps

    def choose(self, now: float, *, only: Collection[int] | None = None) -> ChosenRows | None:
        """The rows of the next step, or None if nothing can be computed before a step in flight completes. Requests
        whose deadline passed end. `only` limits the step to these rows and admits nothing."""

    def compose(self, chosen: ChosenRows, forced: Forced = NONE_FORCED) -> StepPlan:
        """The plan of the rows chosen last; nothing else may happen in between. `forced` become drafts of rows that
        have places."""

    def plan(self, now: float, *, only: Collection[int] | None = None) -> StepPlan | None:
        """`choose` and `compose` at once."""

    def prepare_outcome(self) -> None:
        """Called while the device runs the oldest step in flight: do what its confirmation can have ready."""

    def confirm(
        self,
        step_no: int,
        tokens: Int32s,
        counts: Int32s | None = None,
        num_drafts: Int32s | None = None,
        trained: TrainedDrafts | None = None,
    ) -> StepOutcome:
        """The oldest step in flight completed. `tokens` were drawn by its drawing rows, in plan order; `counts` says
        how many by each row of a step with drafts, and `num_drafts` how many drafts each had, if the runner knows;
        `trained`: those of them that a trained drafter proposed beside drafts from text."""

    def run_deferred(self) -> None:
        """Do the work that `plan` and `confirm` deferred."""

    def discard_in_flight(self) -> tuple[int, ...]:
        """A launched step failed: forget all steps in flight. Returns the active rows of the oldest: one of them caused
        the failure."""

    # -- prefixes that are kept cached

    def handles(self, owner: str | None, now: float) -> HandleList:
        """Those of this owner; None: of all."""

    def renew_handle(self, name: str, owner: str, ttl_s: float, now: float) -> int:
        """The owner's handle lives so much longer from now on. Returns 0 if there is none."""

    def copy_handle(self, name: str, owner: str, new_name: str, now: float) -> int:
        """A second handle for the same blocks. Returns 0 if there is none to copy, or no room for one more."""

    def drop_handles(self, name: str, owner: str | None) -> int:
        """End those with this name, of this owner or of any. Returns how many there were."""

    def block_map(self, max_nodes: int, now: float) -> BlockMap | None:
        """What is cached, with so many nodes of the prefix tree at most. None without a KV cache."""

    def forget(self, owner: str, salt: str = "") -> Forgotten:
        """Drop the owner's handles, and its own blocks wherever they are. Its requests have been aborted.
        `salt`: under which a gateway keeps the owner's blocks here, in place of its name."""

    # -- copies between locations

    def take_copies(self) -> list[BlockCopies]:
        """Copies to start now, beside the steps. Called after every `plan`."""

    def copies_done(self, copies: BlockCopies, failed: bool, seconds: float = 0.0) -> None:
        """These copies have ended. `seconds`: how long they took, without waiting for their turn."""

    def settle(self, now: float) -> None:
        """No request will run any more: `take_copies` moves blocks to where they outlive the process."""

    # -- what the engine measured, and what it reports

    def observe_step(self, plan: StepPlan, seconds: float) -> None:
        """A completed step occupied the device for this long."""

    def observe_speed(self, tokens_per_s: float) -> None:
        """Throughput of full steps; 0 until measured."""

    def figures(self, now: float) -> PlannerFigures: ...

    def check_sums(self) -> None:
        """Raises if the planner's books do not balance: the pool equation, where there is a pool."""


@dataclass(slots=True)
class RepeatedOutcome:
    """What steps gave that only decoded the same rows, one after the other."""

    plan: StepPlan
    """The last one launched."""
    request_ids: Int64s
    """Of the rows: each got one token in every step."""


class RepeatingPlanner(Protocol):
    """A planner that can take many turns of the cycle at once, for a runner whose results are known ahead."""

    def repeats_ahead(self) -> tuple[StepPlan, int] | None:
        """The last plan, and how many steps after it will only decode the same rows as long as nobody comes, goes or
        draws an end token. None: at most one."""

    def repeat(self, tokens: Int32s) -> RepeatedOutcome:
        """As many steps as `tokens` [steps, rows] has: each is planned and launched, and the oldest in flight
        confirmed with its tokens."""

    def observe_repeated(self, last: StepPlan, seconds: Sequence[float]) -> None:
        """These steps, of which `last` is the last one, occupied the device for so long."""
