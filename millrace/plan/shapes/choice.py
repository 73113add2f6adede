"""Which shape a step runs at: of those that the runner declares and that fit, the first one that is not cold.

A CPU runs every step at its own size. A GPU runs most at a padded shape that has a graph; steps that are rare or fit no
such shape run at their own size.
"""

from __future__ import annotations

from functools import partial

from millrace.plan.shapes.captures import Captures
from millrace.plan.shapes.declared import DeclaredShapes, OwnSizes, StepSizes
from millrace.plan.shapes.heads import DueRows, HeadChoice
from millrace.plan.step import DrawShape, HeadShape, StepShape


class ShapeChoice:
    def __init__(self, declared: DeclaredShapes | None = None) -> None:
        """`declared`: by default every step runs at its own size."""
        self._declared = declared = OwnSizes() if declared is None else declared
        self.captures = Captures(declared.to_capture(), declared.decode_sizes, enabled=declared.can_capture)
        self.has_heads = len(declared.decode_sizes) > 0
        """Heads have sizes. If not, runners draw at the step's own size."""
        self._heads = HeadChoice(declared, self.captures)
        self._settled: StepShape | None = None
        """The last decode shape, if it has a graph and is no fallback: a repeated step runs at it again."""

    def choose(self, sizes: StepSizes) -> tuple[StepShape, bool]:
        """The shape, and whether its graph is captured with this step."""
        shape = self._wanted(sizes)
        if shape.kind == "exact":
            return shape, False
        return self._decode(shape) if shape.kind == "decode" else (shape, self.captures.use(shape))

    def repeat(self, last: StepShape, num_rows: int, shared_blocks: int) -> tuple[StepShape, bool]:
        """The same for a step that decodes the rows of the step before, which ran at `last`."""
        if not self.has_heads:
            return last, False
        key = self._declared.repeated_key(last.key, num_rows, shared_blocks)
        if last is self._settled and last.key == key:
            return last, False
        return self._decode(self._declared.decode(num_rows, key=key))

    def heads(self, due: DueRows, shape: StepShape) -> tuple[DrawShape, tuple[HeadShape, ...]]:
        """The heads of a step at this shape, and those of them whose graphs are captured with it. `due`: its rows that
        draw."""
        return self._heads.choose(due, shape)

    def can_wait(self, num_rows: int) -> bool:
        """The draw of a step of this many rows may wait on the device."""
        most = self._declared.waits_above
        return most is not None and num_rows > most

    def _wanted(self, sizes: StepSizes) -> StepShape:
        for shape, prepared_by in self._declared.find(sizes):
            if prepared_by is None or not self.captures.is_cold(prepared_by):
                return shape
        raise AssertionError("the last shape that fits can run at any time")

    def _decode(self, wanted: StepShape) -> tuple[StepShape, bool]:
        """The decode shape to run at. After a fallback, the right one is captured when the engine is idle."""
        decode = partial(self._declared.decode, key=wanted.key, places=wanted.places)
        size = self.captures.choose_size(wanted.rows, decode)
        if size != wanted.rows:
            self.captures.want(wanted)
            self._settled = None
            return decode(size), False
        captures = self.captures.use(wanted)
        self._settled = wanted if self.captures.has(wanted) else None
        return wanted, captures
