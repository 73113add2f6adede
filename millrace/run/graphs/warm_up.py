"""Warm-up of the GPU runner: compiles kernels and captures graphs before steps need them.

The kernels of a first request are compiled, by another process, before the engine reports that it is ready. All other
kernels follow, then graphs are captured on padding-only steps while the engine is idle, the most used first.
"""

from __future__ import annotations

import logging
from functools import partial

import torch

from millrace.ops.triton.compile.dry_run import current_target, dry_run
from millrace.run.graphs.buckets import Buckets
from millrace.run.graphs.graph_cache import GraphCache, Work
from millrace.run.graphs.kernel_build_pool import REPLY_LIMIT_S, KernelBuildPool
from millrace.run.graphs.step_work import StepWork
from millrace.run.packet.step_packet import Bucket
from millrace.run.sampling.device_sampler import VARIANTS, Variant

log = logging.getLogger(__name__)

HOT_DECODE = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Decode sizes captured first; the others follow when the engine is idle, or on their second use."""
FIRST_TOKENS = 128
"""Kernels for prompts of up to this many tokens are compiled before the engine reports that it is ready."""
BUILD_POLL_S = 0.002


def first_request_buckets(buckets: Buckets) -> list[Bucket]:
    """The buckets of a short first request."""
    return [buckets.decode(1), *(bucket for bucket in buckets.all_mixed() if bucket.tokens <= FIRST_TOKENS)]


def capture_order(buckets: Buckets, *, sharing_from: int | None) -> list[Bucket]:
    """All buckets except chunks of long prompts, the most used first. `sharing_from`: minimum number of rows for the
    shared-prefix kernels; None if the model cannot use them."""
    hot = [size for size in buckets.decode_sizes if size in HOT_DECODE]
    rest = [size for size in buckets.decode_sizes if size not in HOT_DECODE]

    def sharing(sizes: list[int]) -> list[Bucket]:
        return [buckets.decode(size, shares_prefix=True) for size in sizes if sharing_from and size >= sharing_from]

    ordered = [buckets.decode(size) for size in hot] + buckets.all_mixed() + sharing(hot)
    return ordered + [buckets.decode(size) for size in rest] + buckets.all_split() + sharing(rest)


class WarmUp:
    def __init__(
        self,
        work: StepWork,
        graphs: GraphCache,
        *,
        to_capture: list[Bucket],
        first: list[Bucket],
        build_pool: KernelBuildPool | None,
    ) -> None:
        """With a `build_pool`, waits until the kernels of the `first` buckets are compiled; meanwhile dry runs find the
        kernels of the other buckets."""
        self._work, self._graphs, self._build_pool = work, graphs, build_pool
        self._to_capture = to_capture[::-1]
        """Stacks: the next bucket is last, as in `_to_build`."""
        # Without long rows: cuDNN would spend a second on preparing them, and other buckets use almost all of their
        # kernels.
        self._to_build = [bucket for bucket in self._to_capture if not bucket.long_from]
        self._missed: set[Bucket] = set()
        if build_pool is not None:
            self._request_builds(build_pool, first, VARIANTS[:1], can_wait=False)
            while self._to_build and not build_pool.is_done(urgent_only=True):
                self._request_builds(build_pool, [self._to_build.pop()], VARIANTS)
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

    def capture_next(self, bucket: Bucket) -> None:
        """Capture this bucket next: a step had to use a fallback."""
        if bucket in self._missed:
            return
        self._missed.add(bucket)
        if bucket in self._to_capture:
            self._to_capture.remove(bucket)
        self._to_capture.append(bucket)

    @torch.inference_mode()
    def warm_next(self) -> None:
        """Warm up one more bucket on a padding-only step: a few tens of milliseconds, or seconds if a kernel was never
        compiled on this machine."""
        if self._build_pool is not None:
            return self._build_next(self._build_pool)
        bucket = self._to_capture.pop()
        if bucket in self._graphs.captured:
            return
        try:
            self._capture(bucket)
        except Exception:  # no request depends on it; a step that needs the graph will report the error
            log.warning("Warm-up stopped: a step could not be run or captured in advance.", exc_info=True)
            self._to_capture.clear()

    def _capture(self, bucket: Bucket) -> None:
        work = self._work
        work.send(None, bucket)
        if bucket.long_from:  # one layer of each kind prepares cuDNN; a whole step would take long
            work.body(bucket, work.decoder.with_distinct_layers())
            self._graphs.capture(bucket, lambda: work.body(bucket))
            return None
        if not bucket.is_decode:
            return self._run_twice(bucket, lambda: work.body(bucket))
        size = bucket.rows
        # Graphs take memory and time, so sampling is captured only for the common sizes and for those that were missed.
        for variant in VARIANTS if size in HOT_DECODE or bucket in self._missed else VARIANTS[:1]:
            if not bucket.shares_prefix:  # steps with prompts replay the head alone
                self._run_twice((size, variant), partial(work.head, size, variant))
            self._run_twice((bucket, variant), partial(work.whole, bucket, variant))

    def _run_twice(self, key: object, work: Work) -> None:
        for _ in range(2):
            self._graphs.run(key, work)

    def _build_next(self, build_pool: KernelBuildPool) -> None:
        """Does not wait: a request may arrive at any moment."""
        if self._to_build:
            self._request_builds(build_pool, [self._to_build.pop()], VARIANTS)
        elif build_pool.is_done(BUILD_POLL_S):
            build_pool.finish()
            self._build_pool = None

    @torch.inference_mode()
    def _request_builds(
        self,
        build_pool: KernelBuildPool,
        buckets: list[Bucket],
        variants: tuple[Variant, ...],
        *,
        can_wait: bool = True,
    ) -> None:
        """Dry-run these buckets and request a build of each kernel they would launch."""
        work = self._work
        try:
            target = current_target()
            gpu, decoder = (target.backend, target.arch, target.warp_size), work.decoder.with_distinct_layers()
            if can_wait:
                # The packet ring is short, and much is in flight during a start: earlier packets must have been read.
                torch.cuda.current_stream().synchronize()
            with dry_run(lambda kernel: build_pool.request(kernel, gpu, can_wait=can_wait)):
                for bucket in buckets:
                    work.send(None, bucket)  # kernels that are not Triton's do run, and read the packet
                    work.body(bucket, decoder)
                    for variant in variants if bucket.is_decode else ():
                        work.head(bucket.rows, variant)
        except Exception:
            log.warning("Kernels are compiled one by one, at their first launch.", exc_info=True)
            self._to_build.clear()
