"""Graph fallback: a step whose graph is not captured yet runs in the graph of a larger decode size.

Capturing takes a tenth of a second in which every stream waits, and launching the kernels one by one takes several
times as long as the step. Padding rows cost almost nothing in comparison. The missing graph is captured when the engine
is idle, or under load after PATIENCE steps without it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Container, Sequence

MAX_PADDING = 2
"""Maximum rows of the larger graph, as a multiple of the step's own shape."""
PATIENCE = 256
"""Steps that run in a fallback graph before their own is captured under load."""


class GraphFallback:
    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._missed: Counter[object] = Counter()

    def choose(self, size: int, key_of: Callable[[int], object], captured: Container[object]) -> int:
        """`size`, or the size of the fallback graph. `key_of` maps a size to its key in `captured`."""
        if key_of(size) in captured:
            return size
        larger = self._sizes[bisect_right(self._sizes, size) :]
        fallback = next((other for other in larger if other <= MAX_PADDING * size and key_of(other) in captured), size)
        if fallback == size:
            return size
        self._missed[key_of(size)] += 1
        return fallback if self._missed[key_of(size)] <= PATIENCE else size
