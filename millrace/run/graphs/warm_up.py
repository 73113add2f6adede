"""What a GPU's steps will need, made ahead of need: kernels, compiled by another process, those of a first request
before the engine says that it is ready; then graphs, captured on steps of padding in idle moments, the usual ones
first."""

from __future__ import annotations

import logging
from functools import partial

import torch

from millrace.ops.triton.compile.prebuild import current_target, rehearsal
from millrace.run.graphs.buckets import Buckets
from millrace.run.graphs.graph_cache import StepGraphs, Work
from millrace.run.graphs.kernel_build_pool import REPLY_LIMIT_S, KernelBuilder
from millrace.run.graphs.step_work import StepWork
from millrace.run.packet.step_packet import Bucket
from millrace.run.sampling.device_sampler import VARIANTS, Variant

log = logging.getLogger(__name__)

HOT_DECODE = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Decode sizes captured first; others follow when the engine is idle or when they are met."""
FIRST_TOKENS = 128
"""Prompts up to so many tokens find their kernels compiled when the engine says that it is ready."""
ORDER_POLL_S = 0.002


def of_first_requests(buckets: Buckets) -> list[Bucket]:
    """What a short first request needs."""
    return [buckets.decode(1), *(bucket for bucket in buckets.all_mixed() if bucket.tokens <= FIRST_TOKENS)]


def usual_first(buckets: Buckets, *, sharing_from: int | None) -> list[Bucket]:
    """All buckets but chunks of long prompts. `sharing_from`: the least number of rows that read a common beginning
    together; None where they cannot."""
    hot = [size for size in buckets.decode_sizes if size in HOT_DECODE]
    rest = [size for size in buckets.decode_sizes if size not in HOT_DECODE]

    def sharing(sizes: list[int]) -> list[Bucket]:
        return [buckets.decode(size, shares=True) for size in sizes if sharing_from and size >= sharing_from]

    ordered = [buckets.decode(size) for size in hot] + buckets.all_mixed() + sharing(hot)
    return ordered + [buckets.decode(size) for size in rest] + buckets.all_split() + sharing(rest)


class WarmUp:
    def __init__(
        self,
        work: StepWork,
        graphs: StepGraphs,
        *,
        to_capture: list[Bucket],
        first: list[Bucket],
        builder: KernelBuilder | None,
    ) -> None:
        """Where there is a `builder`, the kernels of the `first` buckets are compiled at once; meanwhile it is found
        out which the others need."""
        self._work, self._graphs, self._builder = work, graphs, builder
        self._to_capture = to_capture[::-1]
        """The next at the end, as in `_to_build`."""
        # Long rows are left out: the library would prepare itself for them, a second of waiting, and hardly a kernel of
        # theirs is not another's, too.
        self._to_build = [bucket for bucket in self._to_capture if not bucket.long_from]
        self._missed: set[Bucket] = set()
        if builder is not None:
            self._order(builder, first, VARIANTS[:1], can_wait=False)
            while self._to_build and not builder.is_done(all_of_it=False):
                self._order(builder, [self._to_build.pop()], VARIANTS)
            builder.is_done(REPLY_LIMIT_S, all_of_it=False)

    @property
    def is_done(self) -> bool:
        return not self.num_cold and self._builder is None

    @property
    def num_cold(self) -> int:
        return len(self._to_capture) if self._graphs.is_capturing else 0

    def is_waiting(self, bucket: Bucket) -> bool:
        """It has yet to be captured, and its kernels may not have been compiled."""
        return self.num_cold > 0 and bucket in self._to_capture

    def want(self, bucket: Bucket) -> None:
        """A step had to do without this one: it is the next."""
        if bucket in self._missed:
            return
        self._missed.add(bucket)
        if bucket in self._to_capture:
            self._to_capture.remove(bucket)
        self._to_capture.append(bucket)

    @torch.inference_mode()
    def go_on(self) -> None:
        """Compile and capture what one more bucket needs, on a step of padding. A few tens of milliseconds; seconds
        where a kernel has never been compiled on this machine."""
        if self._builder is not None:
            return self._build_next(self._builder)
        bucket = self._to_capture.pop()
        if bucket in self._graphs.captured:
            return
        try:
            self._capture(bucket)
        except Exception:  # nobody waits for it; a step that needs it says what is wrong
            log.warning("Steps are no longer captured ahead of need.", exc_info=True)
            self._to_capture.clear()

    def _capture(self, bucket: Bucket) -> None:
        work = self._work
        work.send(None, bucket)
        if bucket.long_from:  # a layer of each kind is enough to be prepared, and whole steps of it would be long
            work.body(bucket, work.decoder.thin())
            self._graphs.capture(bucket, lambda: work.body(bucket))
            return None
        if not bucket.is_decode:
            return self._run_twice(bucket, lambda: work.body(bucket))
        size = bucket.rows
        # Most requests are sampled, but a graph takes memory and time: only the usual sizes are captured for that, and
        # those that were missed.
        for variant in VARIANTS if size in HOT_DECODE or bucket in self._missed else VARIANTS[:1]:
            if not bucket.shares:  # the head alone is for steps of prompts
                self._run_twice((size, variant), partial(work.head, size, variant))
            self._run_twice((bucket, variant), partial(work.whole, bucket, variant))

    def _run_twice(self, key: object, work: Work) -> None:
        for _ in range(2):
            self._graphs.run(key, work)

    def _build_next(self, builder: KernelBuilder) -> None:
        """Without waiting: a request may come at any moment."""
        if self._to_build:
            self._order(builder, [self._to_build.pop()], VARIANTS)
        elif builder.is_done(ORDER_POLL_S):
            builder.finish()
            self._builder = None

    @torch.inference_mode()
    def _order(
        self, builder: KernelBuilder, buckets: list[Bucket], variants: tuple[Variant, ...], *, can_wait: bool = True
    ) -> None:
        """Have the kernels compiled that these buckets launch, each as soon as it is met."""
        work = self._work
        try:
            target = current_target()
            place, thin = (target.backend, target.arch, target.warp_size), work.decoder.thin()
            if can_wait:
                # Packets have few buffers, and a start has much in flight: those sent before must have been read.
                torch.cuda.current_stream().synchronize()
            with rehearsal(lambda kernel: builder.order(kernel, place, can_wait=can_wait)):
                for bucket in buckets:
                    work.send(None, bucket)  # the library's own kernels do run, and read what is there
                    work.body(bucket, thin)
                    for variant in variants if bucket.is_decode else ():
                        work.head(bucket.rows, variant)
        except Exception:
            log.warning("Kernels are compiled one by one, as they are met.", exc_info=True)
            self._to_build.clear()
