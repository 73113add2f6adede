"""Which heads a step draws with, of those that a runner declares, and whether its draw waits on the device.

Rows that need logits and rows that a greedy head can draw may be two groups of one step, each with a head of its own.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from millrace.plan.shapes.captures import Captures
from millrace.plan.shapes.declared import DeclaredShapes
from millrace.plan.step import OWN_DRAW, DrawShape, HeadShape, StepShape, Variant


@dataclass(slots=True)  # Never modified, but a frozen dataclass takes several times as long to create.
class DueRows:
    """The rows of a step that draw."""

    num_rows: int
    num_from_logits: int = 0
    """Of them: rows that a greedy head cannot draw."""
    can_wait: bool = False
    """Some have masks, which may come late: nothing but the heads depends on them, and a step before is in flight."""


class HeadChoice:
    def __init__(self, declared: DeclaredShapes, captures: Captures) -> None:
        self._declared, self._captures = declared, captures
        self._settled: dict[tuple[int, int], DrawShape] = {}
        """By the sizes of both heads: what was chosen, if nothing is left to capture and none is a fallback. The same
        heads are chosen from then on."""

    def choose(self, due: DueRows, shape: StepShape) -> tuple[DrawShape, tuple[HeadShape, ...]]:
        """The heads, and those of them whose graphs are captured with this step."""
        if not self._declared.decode_sizes or not due.num_rows:
            return OWN_DRAW, ()
        places, num_full = shape.tokens_per_row if shape.kind == "decode" else 1, due.num_from_logits
        num_greedy = due.num_rows - num_full
        if num_full and num_greedy and not self._is_split(num_greedy):
            num_full, num_greedy = due.num_rows, 0
        wanted = self._size(num_full * places), self._size(num_greedy * places)
        if not due.can_wait and wanted in self._settled:
            return self._settled[wanted], ()
        return self._choose(wanted, may_wait=due.can_wait and places == 1)

    def _choose(self, wanted: tuple[int, int], *, may_wait: bool) -> tuple[DrawShape, tuple[HeadShape, ...]]:
        heads = [self._head(wanted[0], "full"), self._head(wanted[1], "greedy")]
        present = [head for head in heads if head is not None]
        has_graphs = all(self._captures.is_captured(head) for head in present)
        sizes = tuple(0 if head is None else head.states for head in heads)
        draw = DrawShape(sizes[0], sizes[1], waits=may_wait and has_graphs)
        captured = tuple(head for head in present if self._captures.use(head))
        if sizes == wanted and not draw.waits and all(self._captures.has(head) for head in present):
            self._settled[wanted] = draw
        return draw, captured

    def _is_split(self, num_greedy: int) -> bool:
        return self._size(num_greedy) in self._declared.split_heads

    def _size(self, states: int) -> int:
        sizes = self._declared.decode_sizes
        return sizes[bisect_left(sizes, states)] if states else 0

    def _head(self, wanted: int, variant: Variant) -> HeadShape | None:
        """After a fallback, the right one is captured when the engine is idle."""
        if not wanted:
            return None
        size = self._captures.choose_size(wanted, lambda size: HeadShape(size, variant))
        if size != wanted:
            self._captures.want(HeadShape(wanted, variant))
        return HeadShape(size, variant)
