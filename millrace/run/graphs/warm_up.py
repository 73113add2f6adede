"""Warm-up of the GPU runner: compiles kernels and captures graphs before steps need them.

The kernels of a first request are compiled, by another process, before the engine reports that it is ready. All other
kernels follow. Graphs are captured on padding-only steps, when a plan says so.
"""

from __future__ import annotations

import logging
from functools import partial

import torch

from millrace.models.decoder import Decoder
from millrace.ops.triton.compile.dry_run import current_target, dry_run
from millrace.plan.shapes.declared import Part
from millrace.plan.step import HeadShape, StepShape
from millrace.run.graphs.graph_cache import GraphCache, Work
from millrace.run.graphs.kernel_build_pool import REPLY_LIMIT_S, KernelBuildPool
from millrace.run.graphs.step_work import Accept, StepWork

log = logging.getLogger(__name__)

BUILD_POLL_S = 0.002


class WarmUp:
    def __init__(
        self,
        work: StepWork,
        graphs: GraphCache,
        *,
        to_build: list[Part],
        first: list[Part],
        build_pool: KernelBuildPool | None,
    ) -> None:
        """With a `build_pool`, waits until the kernels of the `first` parts are compiled; meanwhile dry runs find the
        kernels of the others."""
        self._work = work
        self._graphs = graphs
        self._build_pool = build_pool
        self._to_build = to_build[::-1]
        """A stack: the next part is last."""
        if build_pool is not None:
            self._request_builds(build_pool, first, can_wait=False)
            while self._to_build and not build_pool.is_done(urgent_only=True):
                self._request_builds(build_pool, [self._to_build.pop()])
            build_pool.is_done(REPLY_LIMIT_S, urgent_only=True)

    @property
    def is_done(self) -> bool:
        """True once all kernels are compiled, or no other process compiles them."""
        return self._build_pool is None

    def build_next(self) -> None:
        """Have one more kernel compiled. Does not wait: a request may arrive at any moment."""
        build_pool = self._build_pool
        if build_pool is None:
            return
        if self._to_build:
            self._request_builds(build_pool, [self._to_build.pop()])
        elif build_pool.is_done(BUILD_POLL_S):
            build_pool.finish()
            self._build_pool = None

    @torch.inference_mode()
    def capture(self, part: Part) -> bool:
        """Capture one body or head on a padding-only step: a few tens of milliseconds, or seconds if a kernel was never
        compiled on this machine. False if nothing can be captured."""
        if part in self._graphs.captured:
            return True
        if not self._graphs.is_capturing:
            return False
        try:
            self.capture_part(part)
        except Exception:  # no request depends on it; a step that needs the graph will report the error
            log.warning("Warm-up stopped: a step could not be run or captured in advance.", exc_info=True)
            return False
        return self._graphs.is_capturing

    def capture_part(self, part: Part) -> None:
        work = self._work
        if isinstance(part, HeadShape):
            work.send(None, work.smallest)
            return self._run_twice(part, partial(work.head, part))
        work.send(None, part)
        if work.key_of(part).long_from:  # one layer of each kind prepares cuDNN; a whole step would take long
            work.body(part, work.decoder.with_distinct_layers())
            self._graphs.capture(part, lambda: work.body(part))
            return None
        proposal = work.proposal(part)
        if proposal is not None and proposal not in self._graphs.captured:
            self._run_twice(proposal, partial(work.propose_drafts, part))
        self._run_twice(part, partial(work.body, part))
        if part.places and Accept.of(part) not in self._graphs.captured:
            self._run_twice(Accept.of(part), partial(work.accept_drafts, part))
        return None

    def _run_twice(self, key: object, work: Work) -> None:
        """The first time compiles kernels."""
        for captures in (False, True):
            self._graphs.run(key, work, captures=captures)

    @torch.inference_mode()
    def _request_builds(self, build_pool: KernelBuildPool, parts: list[Part], *, can_wait: bool = True) -> None:
        """Dry-run these parts and request a build of each kernel they would launch."""
        work = self._work
        try:
            target = current_target()
            gpu, decoder = (target.backend, target.arch, target.warp_size), work.decoder.with_distinct_layers()
            if can_wait:
                # The packet ring is short, and much is in flight during a start: earlier packets must have been read.
                torch.cuda.current_stream().synchronize()
            with dry_run(lambda kernel: build_pool.request(kernel, gpu, can_wait=can_wait)):
                for part in parts:
                    # Kernels that are not Triton's do run, and read the packet.
                    work.send(None, work.smallest if isinstance(part, HeadShape) else part)
                    if isinstance(part, HeadShape):
                        work.head(part)
                    else:
                        self.run_step(part, decoder)
        except Exception:
            log.warning("Kernels are compiled one by one, at their first launch.", exc_info=True)
            self._to_build.clear()

    def run_step(self, shape: StepShape, decoder: Decoder) -> None:
        """A step's work but its heads, in its order."""
        work = self._work
        if work.proposal(shape) is not None:
            work.propose_drafts(shape)
        work.body(shape, decoder)
        if shape.places:
            work.accept_drafts(shape)
