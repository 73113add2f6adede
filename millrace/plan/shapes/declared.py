"""What the choice of step shapes is told by a runner: the shapes it has, and which of them fit a step.

What a shape's key stands for only the runner knows. Here keys are compared, and never read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from millrace.plan.step import HeadShape, Int32s, StepShape, exact_shape

Part = StepShape | HeadShape
"""What a graph is captured of: the body of a step, or a head."""
Fitting = tuple[StepShape, StepShape | None]
"""A shape that fits a step, and the shape whose capture prepares it: until then it costs more than it saves. None: it
can run at any time."""


@dataclass(slots=True)  # Never modified, but a frozen dataclass takes several times as long to create.
class StepSizes:
    """What a shape must fit."""

    starts: Int32s
    counts: Int32s
    longest: int
    """Most tokens of a row."""
    num_singles: int = 0
    """Rows at the beginning that are known to have one token each."""
    shared_blocks: int = 0
    drafts: Int32s | None = None
    """Places for drafts of each row; None if the step verifies none."""
    all_draw: bool = True
    scores_prompts: bool = False
    """Every hidden state of some row is needed."""
    adapters: int = 0
    """What adapters of the rows change: 0 nothing, QKV_ALONE queries, keys and values alone, ALL_LINEARS more."""


class DeclaredShapes(Protocol):
    @property
    def decode_sizes(self) -> Sequence[int]:
        """Rows of decode shapes, ascending, and states of heads. Empty if every step runs at its own size."""

    @property
    def split_heads(self) -> Sequence[int]:
        """Sizes of heads, among the decode sizes, at which greedy rows are worth one of their own beside the one that
        draws from logits."""

    @property
    def waits_above(self) -> int | None:
        """In steps of more rows a draw may wait on the device for its masks; None: in no step."""

    @property
    def digest(self) -> str:
        """Of everything declared, and of what the keys stand for: equal on all ranks."""

    @property
    def can_capture(self) -> bool:
        """Steps at these shapes can have graphs."""

    def find(self, sizes: StepSizes) -> Sequence[Fitting]:
        """The shapes that fit a step, the best first. The last one can run at any time."""

    def repeated_key(self, last: int, num_rows: int, shared_blocks: int) -> int:
        """Key of a step in which the rows of the step before decode one token each. `last`: the key of that step."""

    def decode(self, rows: int, *, key: int, places: int = 0) -> StepShape:
        """The decode shape for so many rows."""

    def to_capture(self) -> Sequence[Part]:
        """Everything that is captured while the engine is idle, in order."""


class OwnSizes:
    """Of a runner that runs every step at its own size, on a CPU."""

    PLAIN, WITH_ADAPTERS = 0, 1
    """Keys: whether linears add what adapters add."""
    decode_sizes: Sequence[int] = ()
    split_heads: Sequence[int] = ()
    waits_above: int | None = None
    digest = "own sizes"
    can_capture = False

    def find(self, sizes: StepSizes) -> Sequence[Fitting]:
        num_drafts = 0 if sizes.drafts is None else int(sizes.drafts.sum())
        key = self.WITH_ADAPTERS if sizes.adapters else self.PLAIN
        return ((exact_shape(sizes.counts, num_drafts, key), None),)

    def repeated_key(self, last: int, num_rows: int, shared_blocks: int) -> int:
        return last

    def decode(self, rows: int, *, key: int, places: int = 0) -> StepShape:
        raise AssertionError("a runner without padding has no decode shapes")

    def to_capture(self) -> Sequence[Part]:
        return ()
