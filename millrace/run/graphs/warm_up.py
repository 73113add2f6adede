"""Warm-up of the GPU runner: compiles kernels and captures graphs before steps need them.

The kernels of a first request are compiled, by another process, before the engine reports that it is ready. All other
kernels follow, then graphs are captured on padding-only steps while the engine is idle, the most used first.
"""

from __future__ import annotations

import logging
from functools import partial

import torch

from millrace.ops.triton.compile.dry_run import current_target, dry_run
from millrace.run.drafting.device_drafts import PLACES
from millrace.run.graphs.buckets import Buckets
from millrace.run.graphs.graph_cache import GraphCache, Work
from millrace.run.graphs.kernel_build_pool import REPLY_LIMIT_S, KernelBuildPool
from millrace.run.graphs.step_work import Accept, StepWork
from millrace.run.packet.step_packet import Bucket
from millrace.run.sampling.draw_plan import Head

log = logging.getLogger(__name__)

HOT_DECODE = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Decode sizes captured first; the others follow when the engine is idle, or on their second use."""
FIRST_TOKENS = 128
"""Kernels for prompts of up to this many tokens are compiled before the engine reports that it is ready."""
BUILD_POLL_S = 0.002


Part = Bucket | Head
"""What a graph is captured of: the body of a bucket, or a head."""


def first_request_parts(buckets: Buckets) -> list[Part]:
    """The bodies and the head of a short first request."""
    prompts = [bucket for bucket in buckets.all_mixed() if bucket.tokens <= FIRST_TOKENS]
    return [buckets.decode(1), Head(1, "greedy"), *prompts]


def capture_order(buckets: Buckets, *, sharing_from: int | None) -> list[Part]:
    """All bodies except chunks of long prompts, and the heads, the most used first. `sharing_from`: minimum number of
    rows for the shared-prefix kernels; None if the model cannot use them."""
    hot = [size for size in buckets.decode_sizes if size in HOT_DECODE]
    rest = [size for size in buckets.decode_sizes if size not in HOT_DECODE]

    def decode(size: int) -> list[Part]:
        return [buckets.decode(size), Head(size, "greedy")]

    def sharing(sizes: list[int]) -> list[Part]:
        return [buckets.decode(size, shares_prefix=True) for size in sizes if sharing_from and size >= sharing_from]

    # Graphs take memory and time, so drawing from logits is captured only for the common sizes and for those missed.
    first = [part for size in hot for part in (*decode(size), Head(size, "full"))] + buckets.all_mixed() + sharing(hot)
    return first + [part for size in rest for part in decode(size)] + buckets.all_split() + sharing(rest)


def placed_parts(buckets: Buckets, max_states: int) -> list[Part]:
    """Bodies of decode steps with drafts, for the common sizes."""
    hot = [size for size in buckets.decode_sizes if size in HOT_DECODE]
    sizes = [(size, places) for size in hot for places in PLACES if places == 1 or size * places <= max_states]
    return [buckets.decode(size, places=places) for size, places in sizes]


def build_order(buckets: Buckets, captured: list[Part]) -> list[Part]:
    """Everything whose kernels are compiled in advance: what is captured, and heads of all sizes. Without long rows:
    cuDNN would spend a second on preparing them, and other buckets use almost all of their kernels."""
    heads: list[Part] = [Head(size, "full") for size in buckets.decode_sizes]
    short = [part for part in captured if isinstance(part, Head) or not part.long_from]
    return list(dict.fromkeys(short + heads))


class WarmUp:
    def __init__(
        self,
        work: StepWork,
        graphs: GraphCache,
        *,
        to_capture: list[Part],
        to_build: list[Part],
        first: list[Part],
        build_pool: KernelBuildPool | None,
    ) -> None:
        """With a `build_pool`, waits until the kernels of the `first` parts are compiled; meanwhile dry runs find the
        kernels of the others."""
        self._work, self._graphs, self._build_pool = work, graphs, build_pool
        self._to_capture = to_capture[::-1]
        """Stacks: the next part is last, as in `_to_build`."""
        self._to_build = to_build[::-1]
        self._missed: set[Part] = set()
        if build_pool is not None:
            self._request_builds(build_pool, first, can_wait=False)
            while self._to_build and not build_pool.is_done(urgent_only=True):
                self._request_builds(build_pool, [self._to_build.pop()])
            build_pool.is_done(REPLY_LIMIT_S, urgent_only=True)

    @property
    def is_done(self) -> bool:
        return not self.num_cold and self._build_pool is None

    @property
    def num_cold(self) -> int:
        return len(self._to_capture) if self._graphs.is_capturing else 0

    def is_cold(self, bucket: Bucket) -> bool:
        """True if the bucket is not captured yet; its kernels may not be compiled either."""
        return self.num_cold > 0 and bucket in self._to_capture

    def capture_next(self, part: Part) -> None:
        """Capture this part next: a step had to use a fallback."""
        if part in self._missed:
            return
        self._missed.add(part)
        if part in self._to_capture:
            self._to_capture.remove(part)
        self._to_capture.append(part)

    @torch.inference_mode()
    def warm_next(self) -> None:
        """Warm up one more body or head on a padding-only step: a few tens of milliseconds, or seconds if a kernel was
        never compiled on this machine."""
        if self._build_pool is not None:
            return self._build_next(self._build_pool)
        part = self._to_capture.pop()
        if part in self._graphs.captured:
            return
        try:
            self._capture(part)
        except Exception:  # no request depends on it; a step that needs the graph will report the error
            log.warning("Warm-up stopped: a step could not be run or captured in advance.", exc_info=True)
            self._to_capture.clear()

    def _capture(self, part: Part) -> None:
        work = self._work
        if isinstance(part, Head):
            work.send(None, work.smallest)
            return self._run_twice(part, partial(work.head, part))
        work.send(None, part)
        if part.long_from:  # one layer of each kind prepares cuDNN; a whole step would take long
            work.body(part, work.decoder.with_distinct_layers())
            self._graphs.capture(part, lambda: work.body(part))
            return None
        self._run_twice(part, partial(work.body, part))
        if part.places and Accept.of(part) not in self._graphs.captured:
            self._run_twice(Accept.of(part), partial(work.accept_drafts, part))
        return None

    def _run_twice(self, key: object, work: Work) -> None:
        for _ in range(2):
            self._graphs.run(key, work)

    def _build_next(self, build_pool: KernelBuildPool) -> None:
        """Does not wait: a request may arrive at any moment."""
        if self._to_build:
            self._request_builds(build_pool, [self._to_build.pop()])
        elif build_pool.is_done(BUILD_POLL_S):
            build_pool.finish()
            self._build_pool = None

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
                    work.send(None, work.smallest if isinstance(part, Head) else part)
                    if isinstance(part, Head):
                        work.head(part)
                    else:
                        work.body(part, decoder)
                        if part.places:
                            work.accept_drafts(part)
        except Exception:
            log.warning("Kernels are compiled one by one, at their first launch.", exc_info=True)
            self._to_build.clear()
