"""Which captured graph a step takes whose own has not been captured: a larger one, for a while.

To capture one takes a tenth of a second, in which every stream waits, and to launch its kernels one by one takes
several times as long as the step. Rows of padding cost next to nothing beside that. So a step without a graph takes the
next larger one there is, and its own is captured in an idle moment; or, where there is none of these, once it has been
missed so often that the wait is worth it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Container, Sequence

MOST_PADDING = 2
"""A larger graph has at most so many times the rows."""
PATIENCE = 256
"""Steps that do without their own graph before it is captured under load."""


class NearSizes:
    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._missed: Counter[object] = Counter()

    def choose(self, size: int, key_of: Callable[[int], object], captured: Container[object]) -> int:
        """`size`, or that of the graph to take instead. `key_of` names a size's graph."""
        if key_of(size) in captured:
            return size
        larger = self._sizes[bisect_right(self._sizes, size) :]
        near = next((other for other in larger if other <= MOST_PADDING * size and key_of(other) in captured), size)
        if near == size:
            return size
        self._missed[key_of(size)] += 1
        return near if self._missed[key_of(size)] <= PATIENCE else size
