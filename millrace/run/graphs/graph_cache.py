"""CUDA graphs by key. Work runs uncaptured the first time, which compiles its kernels; later it is captured, and from
then on replayed. Plans say when the body of a step is captured; other work is captured the second time it runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from millrace.plan.shapes.fallback import GraphFallback

log = logging.getLogger(__name__)

Work = Callable[[], Tensor]


@dataclass(slots=True)
class Captured:
    graph: torch.cuda.CUDAGraph
    output: Tensor


class GraphCache:
    def __init__(self, sizes: Sequence[int], *, enabled: bool) -> None:
        """`sizes`: decode sizes, for the graph fallback. Unless `enabled`, no graph is captured."""
        self.has_graphs = self.is_capturing = enabled
        self._pool = torch.cuda.graph_pool_handle() if enabled else None
        self._fallback = GraphFallback(sizes)
        self._seen: set[object] = set()
        self._due: set[object] = set()
        """Work whose graph the plans so far asked for. Choices follow from it, not from what was captured: a rank that
        cannot capture chooses as the others do, and runs the same work uncaptured."""
        self.captured: dict[object, Captured] = {}

    def run(self, key: object, work: Work) -> Tensor:
        """Run work that is captured the second time."""
        captures = key in self._seen
        self._seen.add(key)
        return self.run_planned(key, work, captures=captures)

    def run_planned(self, key: object, work: Work, *, captures: bool) -> Tensor:
        """Replay the work's graph. Without one, capture it first if `captures`, else run uncaptured."""
        captured = self.captured.get(key)
        if captured is None and captures and self.has_graphs:
            self._due.add(key)
            captured = self.capture(key, work) if self.is_capturing else None
        if captured is None:
            return work()
        captured.graph.replay()
        return captured.output

    def expect(self, key: object) -> None:
        """A plan asks for this graph."""
        if self.has_graphs:
            self._due.add(key)

    def choose_size(self, size: int, key_of: Callable[[int], object]) -> int:
        """The decode size whose graph to run: `size` or, as a fallback, a larger one. `key_of`: the key of a size."""
        return self._fallback.choose(size, key_of, self._due)

    def capture(self, key: object, work: Work) -> Captured | None:
        """Capture the work. If that fails, return None and stop capturing: work can still run uncaptured."""
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                output = work()
        except Exception:
            log.warning("A step could not be captured as a CUDA graph; further steps run uncaptured.", exc_info=True)
            self.is_capturing = False
            return None
        self.captured[key] = captured = Captured(graph, output)
        return captured
