"""Which shape a step runs at.

A CPU runs every step at its own size. A GPU runs most at a padded shape that has a graph; steps that are rare or fit no
such shape run at their own size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from millrace.plan.shapes.captures import Captures
from millrace.plan.shapes.order import MIN_SHARING_ROWS, capture_order
from millrace.plan.shapes.table import ShapeFacts, ShapeTable
from millrace.plan.step import FEW, Int32s, StepShape, exact_shape

MIN_SHARED_TOKENS = 256
"""Minimum shared-prefix tokens for which the shared-prefix kernels are worth their extra launch."""


@dataclass(slots=True)  # Never modified, but a frozen dataclass takes several times as long to create.
class StepSizes:
    """What the choice depends on in a step."""

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
    adapters: bool = False
    """Some row has an adapter."""


class ShapeChoice(Protocol):
    captures: Captures

    def choose(self, sizes: StepSizes) -> tuple[StepShape, bool]:
        """The shape, and whether its graph is captured with this step."""

    def repeat(self, last: StepShape, num_rows: int, shared_blocks: int) -> tuple[StepShape, bool]:
        """The same for a step that decodes the rows of the step before, which ran at `last`."""


def make_shape_choice(facts: ShapeFacts | None) -> ShapeChoice:
    """`facts`: None for a runner that runs every step at its own size."""
    return ExactShapes() if facts is None else PaddedShapes(facts)


class ExactShapes:
    def __init__(self) -> None:
        self.captures = Captures((), (), enabled=False)

    def choose(self, sizes: StepSizes) -> tuple[StepShape, bool]:
        num_drafts = 0 if sizes.drafts is None else int(sizes.drafts.sum())
        return exact_shape(sizes.counts, num_drafts, sizes.adapters), False

    def repeat(self, last: StepShape, num_rows: int, shared_blocks: int) -> tuple[StepShape, bool]:
        return last, False


class PaddedShapes:
    def __init__(self, facts: ShapeFacts) -> None:
        self._facts = facts
        self._table = table = ShapeTable(facts)
        self.captures = Captures(capture_order(table), table.decode_sizes, enabled=facts.can_capture)
        self._settled: StepShape | None = None
        """The last decode shape, if it has a graph and is no fallback: a repeated step runs at it again."""
        self._with_adapters: dict[StepShape, StepShape] = {}

    def choose(self, sizes: StepSizes) -> tuple[StepShape, bool]:
        shape = self._wanted(sizes)
        if sizes.adapters:
            shape = self._adapted(shape)
        if shape.is_exact:
            return shape, False
        return self._decode(shape) if shape.is_decode else (shape, self.captures.use(shape))

    def repeat(self, last: StepShape, num_rows: int, shared_blocks: int) -> tuple[StepShape, bool]:
        shares_prefix = self._shares_prefix(num_rows, shared_blocks)
        if last is self._settled and last.shares_prefix == shares_prefix:
            return last, False
        wanted = self._table.decode(num_rows, shares_prefix=shares_prefix)
        return self._decode(self._adapted(wanted) if last.adapters else wanted)

    def _decode(self, wanted: StepShape) -> tuple[StepShape, bool]:
        """The decode shape to run at. After a fallback, the right one is captured when the engine is idle."""

        def decode(rows: int) -> StepShape:
            shape = self._table.decode(rows, shares_prefix=wanted.shares_prefix, places=wanted.places)
            return self._adapted(shape) if wanted.adapters else shape

        size = self.captures.choose_size(wanted.rows, decode)
        if size != wanted.rows:
            self.captures.want(wanted)
            self._settled = None
            return decode(size), False
        captures = self.captures.use(wanted)
        self._settled = wanted if self.captures.has(wanted) else None
        return wanted, captures

    def _adapted(self, shape: StepShape) -> StepShape:
        """The same for a step with adapters, whose graphs are others: steps without any do not pay for them."""
        if shape.is_exact:
            return replace(shape, adapters=True)
        adapted = self._with_adapters.get(shape)
        if adapted is None:
            adapted = self._with_adapters[shape] = replace(shape, adapters=True)
        return adapted

    def _wanted(self, sizes: StepSizes) -> StepShape:
        num_rows, table = len(sizes.counts), self._table
        if sizes.drafts is not None and sizes.longest == 1 and sizes.all_draw:
            return table.decode(num_rows, places=table.places(1 + _max_of(sizes.drafts), num_rows))
        if sizes.longest == 1 and not sizes.scores_prompts:
            return table.decode(num_rows, shares_prefix=self._shares_prefix(num_rows, sizes.shared_blocks))
        num_singles, chunks = sizes.num_singles, sizes.counts[sizes.num_singles :].tolist()
        num_tokens = num_singles + sum(chunks)
        long_from = self._long_from(sizes)
        if long_from and num_rows == 1 and not sizes.scores_prompts:
            return table.chunk(int(sizes.starts[0]))
        tiles = table.num_tiles(chunks, num_singles, long_from)
        if not long_from and not sizes.scores_prompts:
            has_decode_rows, context = num_singles > 0 or min(chunks) == 1, _max_of(sizes.starts)
            shape = table.mixed(num_tokens, num_rows, tiles, has_decode_rows=has_decode_rows, context=context)
            if shape is not None:
                return self._unsplit_if_cold(shape)
        last_only = not sizes.scores_prompts and table.last_only(num_tokens, num_rows)
        return StepShape(
            num_tokens, num_rows, tiles, is_decode=False, long_from=long_from, last_only=last_only, is_exact=True
        )

    def _shares_prefix(self, num_rows: int, shared_blocks: int) -> bool:
        facts = self._facts
        return (
            facts.can_share_prefix
            and num_rows >= MIN_SHARING_ROWS
            and shared_blocks * facts.block_size >= MIN_SHARED_TOKENS
        )

    def _long_from(self, sizes: StepSizes) -> int:
        """Minimum number of tokens of a row that uses cuDNN attention; 0 for none. Only full chunks that follow full
        chunks: cuDNN needs 0.1 to 0.4 s of preparation per pair of lengths, and these few pairs are warmed up."""
        budget = self._facts.token_budget
        if not self._facts.takes_long_rows or sizes.longest != budget:
            return 0
        context = int(sizes.starts[sizes.counts.argmax()])
        return 0 if context % budget or self.captures.is_cold(self._table.chunk(context)) else budget

    def _unsplit_if_cold(self, shape: StepShape) -> StepShape:
        """Falls back to an unsplit context until the split graph has been captured: compiling its kernels now would
        take far longer than the split saves."""
        return replace(shape, parts=1) if shape.parts > 1 and self.captures.is_cold(shape) else shape


def _max_of(counts: Int32s) -> int:
    return max(counts.tolist()) if len(counts) < FEW else int(counts.max())
