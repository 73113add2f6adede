"""`StepPlan`, what one step does, and `StepOutcome`, what it gave: plain data between `plan`, `engine` and `run`.

Facts about every row are columns; admissions, releases and ends are records, because they are rare.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from millrace.params.classes import FinishReason
from millrace.params.rows import RowParams

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Uint32s = npt.NDArray[np.uint32]
Bools = npt.NDArray[np.bool_]

FEW = 16
"""Below this length a Python loop beats a NumPy call."""
ONE = np.int32(1)
"""Added to a column of int32 numbers in less time than a Python integer."""
NO_EPOCH = -1
"""Epoch of a plan that repeats no other and that no other repeats."""

ReleaseReason = FinishReason | Literal["preempted"]
Variant = Literal["greedy", "full"]
Kind = Literal["decode", "mixed", "exact"]
"""Of steps: every row has one token, or places; some have more; no padding."""
Location = Literal["device", "host", "disk"]
"""Where a KV block can be: the pool, host memory, a disk of this machine."""


QKV_ALONE, ALL_LINEARS = 1, 2
"""What adapters of a step change: queries, keys and values alone, or more."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """The sizes that a step runs at, on every rank, and how it runs."""

    kind: Kind
    """`decode`: one token per row, or `places`. `exact`: the step's own size, without padding; it runs uncaptured."""
    tokens: int
    rows: int
    places: int = 0
    """Decode shapes with drafts: tokens of each row, which starts where the device knows; 0 = one token of each, and
    the host knows where."""
    key: int = 0
    """Of the table that the runner declares: tiles, parts of contexts, thresholds. Plans compare keys; only runners
    know what they stand for."""

    def __hash__(self) -> int:
        """Every step looks its shape up several times. The kind follows from the others for most shapes."""
        return hash((self.tokens, self.rows, self.places, self.key))

    @property
    def tokens_per_row(self) -> int:
        """Of decode shapes."""
        return max(1, self.places)


def exact_shape(counts: Int32s, num_drafts: int = 0, key: int = 0) -> StepShape:
    """The shape of a step that runs at its own size. `num_drafts`: most drafts that it verifies."""
    num_rows = len(counts)
    num_tokens = sum(counts.tolist()) if num_rows < FEW else int(counts.sum())
    return StepShape("exact", num_tokens + num_drafts, num_rows, key=key)


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The size of a head: how many states it draws from, and how."""

    states: int
    variant: Variant


@dataclass(frozen=True, slots=True)
class DrawShape:
    """The heads that a step draws with, on every rank, and how its draw is queued. Without a head the runner draws at
    the step's own size."""

    full: int = 0
    """States of the head that draws from logits, padding included; 0: there is none."""
    greedy: int = 0
    """States of the head that draws greedily."""
    waits: bool = False
    """The draw is queued with the forward pass, and waits on the device for its masks."""

    @property
    def heads(self) -> tuple[HeadShape, ...]:
        """In the order in which they draw."""
        heads = (HeadShape(self.greedy, "greedy"), HeadShape(self.full, "full"))
        return tuple(head for head in heads if head.states)


OWN_DRAW = DrawShape()


@dataclass(frozen=True, slots=True)
class CapturePlan:
    """Capture a graph of this shape, on a step of padding only. Sent between steps, in order, so that every rank has
    the same graphs. A runner that cannot capture it runs the shape uncaptured."""

    shape: StepShape | HeadShape


@dataclass(slots=True)  # Never modified, but a frozen dataclass takes several times as long to create.
class Admission:
    """A request gets a table row. Sent once, and again after a failed step, when the runner's table is rebuilt."""

    row: int
    request_id: int
    tokens: Int32s
    """All tokens known on the host: the prompt, and the output from before a preemption."""
    num_prompt: int
    row_params: RowParams
    limit: int = 0
    """Maximum number of tokens, prompt included. A step with drafts never goes beyond it."""
    num_computed: int = 0
    """Tokens whose keys and values are in the cache already."""
    adapter: int = 0
    """Slot of the adapter that computes it; 0 for the base model."""


@dataclass(slots=True)  # Never modified, but a frozen dataclass takes several times as long to create.
class Release:
    """A request leaves its row. The row is reused only after all steps launched so far have completed."""

    row: int
    request_id: int
    reason: ReleaseReason


@dataclass(frozen=True, slots=True)
class Appended:
    """Tokens that a row is given without a draw, because its grammar allows no others: they are computed like a prompt.
    The first one is drawn by the step before, from a mask that allows nothing else."""

    row: int
    start: int
    """Position of the first token."""
    tokens: Int32s


@dataclass(frozen=True, slots=True)
class TrainedPlaces:
    """Which places for drafts a trained drafter may fill, where drafts come from text first."""

    places: Int32s
    """Of each row of the step, as in `StepPlan.draft_places`."""
    worth: float
    """Tokens that its drafts give a row beyond what they cost: drafts from text must promise as many."""


@dataclass(frozen=True, slots=True)
class TrainedDrafts:
    """What a trained drafter did in a step."""

    num_drafts: Int32s
    """Its drafts of each drawing row."""
    seconds: float
    """Time that it took to propose them, as part of the step's."""


@dataclass(frozen=True, slots=True)
class ForcedDrafts:
    """Drafts that the host knows before the device proposes: the only tokens that a row's grammar allows after those of
    the steps in flight. They take the row's places."""

    row: int
    tokens: Int32s


@dataclass(slots=True)  # Never modified, but a frozen dataclass takes several times as long to create.
class PlacedTokens:
    """Keys and values of a document that was computed at other positions: copied at the head of the step, with the keys
    rotated by the distance."""

    sources: Int32s
    """Blocks that hold the tokens, in order."""
    source_start: int
    """Offset of the first token in the first of them."""
    targets: Int32s
    target_start: int
    count: int
    distance: int
    """Positions by which the tokens move."""


@dataclass(slots=True)  # Never modified, but a frozen dataclass takes several times as long to create.
class StateCopies:
    """Copies of recurrent states, in all layers: the first `num_loads` from a slot to a row, before the step's tokens
    are computed; the others from a row to a slot, after them."""

    rows: Int32s
    slots: Int32s
    positions: Int32s
    """Tokens computed in the state that is copied."""
    num_loads: int


@dataclass(slots=True)  # Never modified, but a frozen dataclass takes several times as long to create.
class StepPlan:
    step_no: int
    rows: Int32s
    """Table rows of this step: rows with one token first, then rows with longer chunks."""
    starts: Int32s
    """Position of each row's first token in this step. A row that drew with drafts in a step still in flight may be
    further by then: with `draft_places` the device's own count is what holds, and this is the least it can be."""
    counts: Int32s
    """Tokens of each row in this step."""
    samples: Bools
    """True for rows whose chunk reaches their last known token and that draw a new one. The others give no token, but
    may be scored or pooled: what a row gives is these three flags."""
    block_rows: Int32s
    """Block-table updates since the last plan: block_tables[group, block_rows, block_cols] = block_ids."""
    block_cols: Int32s
    block_ids: Int32s
    shape: StepShape
    """The sizes that every rank runs the step at."""
    admitted: tuple[Admission, ...] = ()
    released: tuple[Release, ...] = ()
    appended: tuple[Appended, ...] = ()
    shared_blocks: int = 0
    """Number of leading blocks shared by all rows; 0 unless every row has a single token."""
    block_groups: Int32s | None = None
    """KV group of each block-table update; None if all are of group 0."""
    draft_places: Int32s | None = None
    """Places for drafts of each row, beyond its `counts`; None if the step verifies no drafts."""
    draft_floor: float = 0.0
    """Drafts less likely than this to be accepted are not worth their place."""
    trained: TrainedPlaces | None = None
    """None: the engine's drafter may fill all places. Else drafts come from text first."""
    trained_rests: bool = False
    """True if the trained drafter need not know what the step computes: it drafts no more for these rows."""
    forced: tuple[ForcedDrafts, ...] = ()
    """Only for runners whose drafters do not ask the grammars themselves."""
    masked: Bools | None = None
    """True for drawing rows whose next token a grammar restricts: the draw waits for their masks. None if none has."""
    scored: Bools | None = None
    """True for rows whose prompt tokens in this step get log-probabilities. None if none has."""
    pooled: Bools | None = None
    """True for rows whose result is a vector, pooled from the hidden states of prompt tokens. None if none is."""
    states: StateCopies | None = None
    """Checkpoints of recurrent states that rows begin with or leave. None if there are none."""
    placed: tuple[PlacedTokens, ...] = ()
    """Tokens of admitted rows that no step computes."""
    draw: DrawShape = OWN_DRAW
    captures: tuple[StepShape | HeadShape, ...] = ()
    """Of the step's shape and heads: those whose graph is captured with this step. They ran before and have none."""
    epoch: int = NO_EPOCH
    """Grows with every change of the step's rows. A plan with the epoch of the plan before decodes the same rows in the
    same order, with no admission or release: each row computes the token it drew in the step before, so whatever
    depends only on the rows stays valid."""

    def repeats(self, epoch: int) -> bool:
        """True if this plan repeats the plan before it, whose epoch is given."""
        return self.epoch == epoch and epoch != NO_EPOCH

    @property
    def num_tokens(self) -> int:
        return sum(self.counts.tolist()) if len(self.counts) < FEW else int(self.counts.sum())


@dataclass(frozen=True, slots=True)
class Masks:
    """One mask for each drawn token that a grammar restricts."""

    index: Int64s
    """Of each token: its row's index among the rows that draw, ascending. In a head: its index among the tokens."""
    bits: Uint32s
    """[n, vocab / 32, rounded up]: bit t % 32 of word t // 32 is 1 if token t may be drawn."""
    places: Int64s | None = None
    """Of each token: its place in its row, after that many drafts. None: all are the first."""

    @property
    def rows(self) -> Int64s:
        """The rows with masks: their indices among those that draw."""
        return self.index if self.places is None else self.index[self.places == 0]

    def of(self, draws: Int64s) -> Masks | None:
        """The masks of some of the drawn tokens, ascending, which are then numbered from 0; None if none has one."""
        is_kept = np.isin(self.index, draws)
        return Masks(np.searchsorted(draws, self.index[is_kept]), self.bits[is_kept]) if is_kept.any() else None


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What is known of a step only later than its plan, before the draw."""

    step_no: int
    masks: Masks | None = None
    drafts: tuple[Int32s, ...] = ()
    """Drafts of each drawing row of the plan, as rank 0 proposed them. Empty: none has any."""


@dataclass(frozen=True, slots=True)
class BlockCopies:
    """Copies of whole blocks between two locations, done beside the steps and acknowledged as one."""

    copies_no: int
    source: Location
    target: Location
    blocks: Int32s
    """Where the blocks are in the source: ids in the KV pool, slots elsewhere. Nothing in flight writes them."""
    slots: Int32s
    """Where they go in the target, one per block."""
    names: tuple[bytes, ...] = ()
    """To and from a disk: what is stored beside each block, so that it is found after a restart."""


@dataclass(slots=True)  # Never modified, but a frozen dataclass takes several times as long to create.
class Ended:
    """The terminal event of a request: every request has exactly one."""

    request_id: int
    reason: FinishReason
    message: str = ""
    stop_token_id: int = -1
    num_prompt: int = 0
    num_output: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    placed_tokens: int = 0


@dataclass(slots=True)  # Never modified, but a frozen dataclass takes several times as long to create.
class StepOutcome:
    """Tokens that a completed step delivered to requests still running, as columns over those tokens."""

    step_no: int
    request_ids: Int64s
    tokens: Int32s
    """With drafts a request may have several, one after the other."""
    sample_index: Int64s
    """Index of each delivered token's row among the step's sampling rows, to look up its log-probabilities: rows with
    log-probabilities have no drafts, so they draw one token."""
    first_ids: Int64s
    """Requests that got their first token in this step."""
    ended: tuple[Ended, ...]
    num_appended: int = 0
    """How many of the tokens were appended without a draw. Each follows the drawn token of its row."""
