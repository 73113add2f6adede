"""CUDA graphs of work that recurs, by its key: the first time it is launched kernel by kernel, which compiles and warms
what it launches; the second time it is captured, and from then on replayed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from millrace.run.graphs.graph_fallback import NearSizes

log = logging.getLogger(__name__)

Work = Callable[[], Tensor]


@dataclass(slots=True)
class Captured:
    graph: torch.cuda.CUDAGraph
    output: Tensor


class StepGraphs:
    def __init__(self, sizes: Sequence[int], *, wanted: bool) -> None:
        """`sizes`: of decode steps, of which a larger one may stand in for another."""
        self.is_capturing = wanted
        self._pool = torch.cuda.graph_pool_handle() if wanted else None
        self._near_sizes = NearSizes(sizes)
        self._met: set[object] = set()
        self.captured: dict[object, Captured] = {}

    def run(self, key: object, work: Work) -> Tensor:
        captured = self.captured.get(key)
        if captured is None and self.is_capturing:
            if key in self._met:
                captured = self.capture(key, work)
            self._met.add(key)
        if captured is None:
            return work()
        captured.graph.replay()
        return captured.output

    def near(self, size: int, key_of: Callable[[int], object]) -> int:
        """`size`, or that of the larger graph to take for now. `key_of` names a size's graph."""
        return self._near_sizes.choose(size, key_of, self.captured) if self.is_capturing else size

    def capture(self, key: object, work: Work) -> Captured | None:
        """None, and no further captures, where this one fails: the same work can still be launched kernel by kernel."""
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                output = work()
        except Exception:
            log.warning(
                "A step could not be captured as a CUDA graph; new ones are launched uncaptured.", exc_info=True
            )
            self.is_capturing = False
            return None
        self.captured[key] = captured = Captured(graph, output)
        return captured
