"""Which shapes have a graph, and which get one next.

A shape, or a head, gets its graph by a plan: a `CapturePlan` while the engine is idle, or the second step that runs it.
So the set follows from the plans, and is the same on every rank that runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from millrace.plan.shapes.declared import Part
from millrace.plan.shapes.fallback import GraphFallback
from millrace.plan.step import CapturePlan, StepShape


class Captures:
    def __init__(self, to_capture: Sequence[Part], sizes: Sequence[int], *, enabled: bool) -> None:
        """`to_capture`: in order. `sizes`: decode sizes, for the graph fallback."""
        self._enabled = enabled
        self.waiting: dict[Part, None] = dict.fromkeys(to_capture[::-1])
        """A stack: the next part is last."""
        self._wanted: set[Part] = set()
        self._captured: set[Part] = set()
        self._seen: set[Part] = set()
        """Parts that a step ran without a graph, which compiled their kernels."""
        self._fallback = GraphFallback(sizes)

    @property
    def num_left(self) -> int:
        return len(self.waiting)

    def is_cold(self, shape: StepShape) -> bool:
        """True if the shape will be captured and is not yet; its kernels may not be compiled either."""
        return shape in self.waiting

    def has(self, part: Part) -> bool:
        """True if nothing is left to capture: the part has a graph, or none ever will."""
        return not self._enabled or part in self._captured

    def is_captured(self, part: Part) -> bool:
        return self._enabled and part in self._captured

    def choose_size(self, size: int, part_of: Callable[[int], Part]) -> int:
        """The decode size to run: `size` or, as a fallback, a larger one that has a graph."""
        return self._fallback.choose(size, part_of, self._captured) if self._enabled else size

    def use(self, part: Part) -> bool:
        """A step runs this part. True if it captures the part's graph."""
        if self.has(part):
            return False
        if part not in self._seen:
            self._seen.add(part)
            return False
        self._captured.add(part)
        self.waiting.pop(part, None)
        return True

    def want(self, part: Part) -> None:
        """Capture this part next: a step had to use a fallback."""
        if not self._enabled or part in self._wanted:
            return
        self._wanted.add(part)
        self.waiting.pop(part, None)
        self.waiting[part] = None

    def next(self) -> CapturePlan | None:
        """What to capture now, if the engine is idle."""
        while self.waiting:
            part, _ = self.waiting.popitem()
            if part not in self._captured:
                self._captured.add(part)
                return CapturePlan(part)
        return None

    def stop(self) -> None:
        """The runner cannot capture: every shape runs uncaptured."""
        self._enabled = False
        self.waiting.clear()
