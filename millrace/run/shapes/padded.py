"""Which shapes of the table fit a step: what a GPU runner declares to the planner."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from hashlib import sha256

from millrace.plan.shapes.declared import Fitting, Part, StepSizes
from millrace.plan.step import FEW, Int32s, StepShape
from millrace.run.shapes.order import capture_order
from millrace.run.shapes.table import ShapeFacts, ShapeTable


class PaddedShapes:
    def __init__(self, facts: ShapeFacts) -> None:
        self.facts = facts
        self.table = ShapeTable(facts)
        self.decode_sizes: Sequence[int] = self.table.decode_sizes
        self.can_capture = facts.can_capture
        self.split_heads = [size for size in facts.greedy_heads if size >= facts.min_split]
        self.waits_above = facts.waits_above
        self._splits = True

    def without_split(self) -> PaddedShapes:
        """The same table, of which shapes with split KV are not used."""
        other = copy(self)
        other._splits = False
        return other

    @cached_property
    def digest(self) -> str:
        """Graphs are no part of it: a rank without them runs the same shapes uncaptured."""
        facts = replace(self.facts, can_capture=False)
        return sha256(repr((facts, self.decode_sizes, self.table.keys, self._splits)).encode()).hexdigest()

    def repeated_key(self, last: int, num_rows: int, shared_blocks: int) -> int:
        key = self._decode_key(num_rows, shared_blocks)
        changes = self.table.keys[last].adapters
        return self.table.adapted[key, changes] if changes else key

    def _decode_key(self, num_rows: int, shared_blocks: int) -> int:
        facts, table = self.facts, self.table
        shares = (
            facts.can_share_prefix
            and num_rows >= facts.sizes.min_sharing_rows
            and shared_blocks * facts.block_size >= facts.sizes.min_shared_tokens
        )
        return table.sharing if shares else table.plain

    def decode(self, rows: int, *, key: int, places: int = 0) -> StepShape:
        return self.table.decode(rows, key=key, places=places)

    def to_capture(self) -> Sequence[Part]:
        return capture_order(self.table)

    def find(self, sizes: StepSizes) -> Sequence[Fitting]:
        found = self._find(sizes)
        if not sizes.adapters:
            return found
        return tuple((self.table.with_adapters(shape, sizes.adapters), prepared_by) for shape, prepared_by in found)

    def _find(self, sizes: StepSizes) -> Sequence[Fitting]:
        num_rows, table = len(sizes.counts), self.table
        if sizes.drafts is not None and sizes.longest == 1 and sizes.all_draw:
            return ((table.decode(num_rows, places=table.places(1 + _max_of(sizes.drafts), num_rows)), None),)
        if sizes.longest == 1 and not sizes.scores_prompts:
            return ((table.decode(num_rows, key=self._decode_key(num_rows, sizes.shared_blocks)), None),)
        return (*self._long(sizes), *self._tiled(sizes))

    def _long(self, sizes: StepSizes) -> tuple[Fitting, ...]:
        """With cuDNN attention. Only full chunks that follow full chunks: cuDNN needs 0.1 to 0.4 s of preparation per
        pair of lengths, and these few pairs are warmed up."""
        budget, num_rows = self.facts.token_budget, len(sizes.counts)
        if not self.facts.takes_long_rows or sizes.longest != budget:
            return ()
        chunk = self.table.chunk(int(sizes.starts[sizes.counts.argmax()]))
        if chunk is None:
            return ()
        return ((chunk if num_rows == 1 and not sizes.scores_prompts else self._exact(sizes, budget), chunk),)

    def _tiled(self, sizes: StepSizes) -> tuple[Fitting, ...]:
        num_rows, num_singles, table = len(sizes.counts), sizes.num_singles, self.table
        if sizes.scores_prompts:
            return ((self._exact(sizes), None),)
        chunks = sizes.counts[num_singles:].tolist()
        num_tokens, tiles = num_singles + sum(chunks), table.num_tiles(chunks, num_singles)
        has_decode_rows = num_singles > 0 or min(chunks) == 1
        shape = table.mixed(num_tokens, num_rows, tiles, has_decode_rows=has_decode_rows)
        if shape is None:
            return ((self._exact(sizes), None),)
        # Compiling the kernels of a split shape now would take far longer than the split saves.
        may_split = self._splits and table.may_split(shape)
        split = table.split(shape, _max_of(sizes.starts)) if may_split else None
        return ((shape, None),) if split is None else ((split, split), (shape, None))

    def _exact(self, sizes: StepSizes, long_from: int = 0) -> StepShape:
        table, counts, num_rows = self.table, sizes.counts.tolist(), len(sizes.counts)
        num_tokens = sum(counts)
        return table.exact(
            num_tokens,
            num_rows,
            is_tiled=table.num_tiles(counts, long_from=long_from) > 0,
            long_from=long_from,
            last_only=not sizes.scores_prompts and table.last_only(num_tokens, num_rows),
        )


def _max_of(counts: Int32s) -> int:
    return max(counts.tolist()) if len(counts) < FEW else int(counts.max())
