"""CUDA graphs by key. Plans say what is captured, and when: after it ran once, which compiled its kernels."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

log = logging.getLogger(__name__)

Work = Callable[[], Tensor]


@dataclass(slots=True)
class Captured:
    graph: torch.cuda.CUDAGraph
    output: Tensor


class GraphCache:
    def __init__(self, *, enabled: bool) -> None:
        """Unless `enabled`, no graph is captured."""
        self.is_capturing = enabled
        self._pool = torch.cuda.graph_pool_handle() if enabled else None
        self.captured: dict[object, Captured] = {}

    def run(self, key: object, work: Work, *, captures: bool) -> Tensor:
        """Replay the work's graph. Without one, capture it first if `captures`, else run uncaptured."""
        captured = self.captured.get(key)
        if captured is None and captures and self.is_capturing:
            captured = self.capture(key, work)
        if captured is None:
            return work()
        captured.graph.replay()
        return captured.output

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
