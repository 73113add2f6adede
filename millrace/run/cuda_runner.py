"""The GPU runner: executes a StepPlan with one copy in, one or two graph replays and one copy out.

Nothing in it waits for the GPU, and the copies run beside the neighbouring steps. A step is padded to a bucket, whose
work (`graphs/step_work.py`) is replayed as a graph: one graph for body and head if every row has one token and draws,
else one for each. A step that fits no bucket runs the same code uncaptured at its exact size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from millrace.models.decoder import Decoder
from millrace.ops.attention import PagedAttention
from millrace.ops.attention.long_rows import CUDNN_MIN_QUERIES, LongRow, can_take_long_rows
from millrace.ops.tuning.load import num_multiprocessors
from millrace.plan.step import Int32s, Int64s, StepPlan
from millrace.run.device.device import Device, Pending
from millrace.run.device.kv_pool import KvFormat, allocate_kv
from millrace.run.graphs.buckets import Buckets
from millrace.run.graphs.graph_cache import GraphCache
from millrace.run.graphs.kernel_build_pool import KernelBuildPool
from millrace.run.graphs.step_work import UPDATES_IN_PACKET, StepWork
from millrace.run.graphs.warm_up import WarmUp, capture_order, first_request_buckets
from millrace.run.packet.step_packet import Bucket, PacketWriter, max_of, min_of
from millrace.run.runner import StepResult, copy_to_host
from millrace.run.sampling.device_sampler import DeviceSampler, Variant
from millrace.run.sampling.logprobs import LogprobColumns, score
from millrace.run.sampling.masks import Masks
from millrace.run.sampling.prompt_scores import PromptLogprobs, score_prompts
from millrace.run.table.request_table import RequestTable

MIN_SHARING_ROWS, MIN_SHARED_TOKENS = 16, 256
"""Minimum rows and shared-prefix tokens for which the shared-prefix kernels are worth their extra launch."""


@dataclass(frozen=True, slots=True)
class DrawPlan:
    """Which rows of a step draw, and how. A repeated decode step reuses it."""

    due: Int64s
    """Indices of the step's rows that draw."""
    variant: Variant
    is_reusable: bool
    """True if the variant does not depend on the rows' lengths."""
    logprob_index: Int64s
    """Indices of the drawn tokens with log-probabilities; `logprob_counts` has the number of top tokens for each."""
    logprob_counts: Int32s


class CudaRunner:
    def __init__(
        self,
        decoder: Decoder,
        device: Device,
        *,
        num_blocks: int,
        block_size: int,
        max_rows: int,
        max_context: int,
        token_budget: int,
        graphs: bool = True,
        kv_dtype: KvFormat = "full",
        build_pool: KernelBuildPool | None = None,
    ) -> None:
        attention, torch_device, spec = decoder.attention, device.torch_device, decoder.spec
        if not isinstance(attention, PagedAttention):
            raise TypeError("CudaRunner needs paged attention")
        graphs = graphs and torch_device.type == "cuda"
        self._decoder, self._device, self._token_budget = decoder, device, token_budget
        self._kv = allocate_kv(
            spec,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=decoder.dtype,
            device=torch_device,
            kv_dtype=kv_dtype,
        )
        # The token budget, plus one token for each decode row beside it.
        max_tokens = token_budget + max_rows
        # A padding row reads as many block-table columns as its tokens need.
        max_blocks = max(min(num_blocks, -(-max_context // block_size)), -(-max_tokens // block_size))
        num_groups = spec.kv_groups.num_groups
        self._table = RequestTable(device, max_rows=max_rows + 1, max_blocks=max_blocks, num_groups=num_groups)
        self._sampler = DeviceSampler(device, self._table, max_rows=max_rows, vocab_size=spec.vocab_size)
        tile_decode_rows, per_tile = attention.tile_decode_rows, attention.queries_per_tile
        self._writer = PacketWriter(
            max_rows=max_rows, block_size=block_size, queries_per_tile=per_tile, tile_decode_rows=tile_decode_rows
        )
        has_windows = any(window is not None for window in spec.windows)
        self._buckets = Buckets(
            max_rows=max_rows,
            token_budget=token_budget,
            queries_per_tile=per_tile,
            tile_decode_rows=tile_decode_rows,
            split_heads=0 if has_windows else spec.num_kv_heads,
            num_multiprocessors=num_multiprocessors(torch_device),
        )
        self._can_share_prefix = not tile_decode_rows and not has_windows
        self._takes_long_rows = (
            not tile_decode_rows
            and token_budget >= CUDNN_MIN_QUERIES
            and not has_windows
            and can_take_long_rows(torch_device, decoder.dtype, spec.head_dim, spec.attention_softcap)
        )
        self._work = StepWork(
            decoder,
            self._kv,
            self._table,
            self._sampler,
            self._writer,
            smallest=self._buckets.decode(1),
            block_size=block_size,
            max_rows=max_rows,
            max_context=max_context,
            max_tokens=max_tokens,
            tile_decode_rows=tile_decode_rows,
        )
        self._draws: DrawPlan | None = None
        """The draw plan of the last step."""
        self._graphs = GraphCache(self._buckets.decode_sizes, enabled=graphs)
        self._warm_up = WarmUp(
            self._work,
            self._graphs,
            to_capture=self._all_buckets(max_blocks * block_size) if graphs else [],
            first=first_request_buckets(self._buckets),
            build_pool=build_pool,
        )

    def _all_buckets(self, max_context: int) -> list[Bucket]:
        """All buckets to capture during warm-up, in order."""
        usual = capture_order(self._buckets, sharing_from=MIN_SHARING_ROWS if self._can_share_prefix else None)
        return usual + (self._buckets.chunks(max_context) if self._takes_long_rows else [])

    @property
    def is_warm(self) -> bool:
        return self._warm_up.is_done

    @property
    def num_cold(self) -> int:
        return self._warm_up.num_cold

    def warm_next(self) -> None:
        self._warm_up.warm_next()

    def forward(self, plan: StepPlan) -> None:
        pass

    def draw(self, plan: StepPlan, masks: Masks | None = None) -> Pending[StepResult]:
        return self.launch(plan)

    def launch(self, plan: StepPlan) -> Pending[StepResult]:
        """Queue the step. Steps run in the order of their launches."""
        return self._device.launch(lambda: self._execute(plan), self._copy_to_host)

    def _copy_to_host(self, result: StepResult) -> StepResult:
        return copy_to_host(result, *self._work.drawn_on_host(len(result.tokens)))

    def _execute(self, plan: StepPlan) -> StepResult:
        self._table.update_host(plan)
        records = self._sampler.records(plan)
        plan = self._table.send_excess_blocks(plan, UPDATES_IN_PACKET)
        bucket, exact = self._bucket_for(plan)
        draws, work = self._draw_plan(plan), self._work
        variant, num_drawn = draws.variant, len(draws.due)
        is_whole = bucket.is_decode and num_drawn == len(plan.rows)
        if is_whole:
            shares_prefix = bucket.shares_prefix
            bucket = self._with_graph(
                bucket, lambda size: (self._buckets.decode(size, shares_prefix=shares_prefix), variant)
            )
        work.send(plan, bucket, records)
        if is_whole:
            logits = self._graphs.run((bucket, variant), lambda: work.whole(bucket, variant))
            return self._finish(plan, draws, logits, ())
        if exact:
            hidden = work.body(bucket, long_rows=_long_rows(plan, bucket.long_from), drawn_only=False)
        else:
            hidden = self._graphs.run(bucket, lambda: work.body(bucket))
        prompt_logprobs = self._score_prompts(plan, hidden)
        if num_drawn == 0:
            return self._finish(plan, draws, None, prompt_logprobs)
        size = self._with_graph(self._buckets.decode(num_drawn), lambda size: (size, variant)).rows
        logits = self._graphs.run((size, variant), lambda: work.head(size, variant))
        return self._finish(plan, draws, logits, prompt_logprobs)

    def _with_graph(self, bucket: Bucket, key_of: Callable[[int], object]) -> Bucket:
        """The decode bucket whose graph to run. After a fallback, the right one is captured when the engine is idle."""
        size = self._graphs.choose_size(bucket.rows, key_of)
        if size == bucket.rows:
            return bucket
        self._warm_up.capture_next(bucket)
        return self._buckets.decode(size, shares_prefix=bucket.shares_prefix)

    def _draw_plan(self, plan: StepPlan) -> DrawPlan:
        last = self._draws
        if plan.is_repeated_decode and last is not None and last.is_reusable:
            return last
        due, sampler = plan.samples.nonzero()[0], self._sampler
        rows = plan.rows[due]
        variant = sampler.variant_for(rows, (plan.starts + plan.counts)[due])
        is_reusable = variant == "greedy" or sampler.needs_full(rows)
        scored = np.flatnonzero(sampler.num_logprobs[rows] >= 0)
        self._draws = draws = DrawPlan(due, variant, is_reusable, scored, sampler.num_logprobs[rows[scored]])
        return draws

    def _bucket_for(self, plan: StepPlan) -> tuple[Bucket, bool]:
        """(bucket, is_exact). Steps that are rare or fit no bucket run uncaptured at their exact size."""
        num_rows, longest = len(plan.rows), 1 if plan.is_repeated_decode else max_of(plan.counts)
        scores_prompts = self._table.scores_prompts(plan.rows)
        if longest == 1 and not scores_prompts:
            return self._buckets.decode(num_rows, shares_prefix=self._shares_prefix(plan)), False
        num_tokens = plan.num_tokens
        long_from = self._long_from(plan, longest)
        if long_from and num_rows == 1 and not scores_prompts:
            return self._buckets.chunk(int(plan.starts[0])), False
        tiles = self._writer.num_tiles(plan.counts, long_from)
        if not long_from and not scores_prompts:
            has_decode_rows, context = min_of(plan.counts) == 1, max_of(plan.starts)
            bucket = self._buckets.mixed(num_tokens, num_rows, tiles, has_decode_rows=has_decode_rows, context=context)
            if bucket is not None:
                return self._unsplit_if_cold(bucket), False
        last_only = not scores_prompts and self._buckets.last_only(num_tokens, num_rows)
        exact = Bucket(num_tokens, num_rows, tiles, is_decode=False, long_from=long_from, last_only=last_only)
        return exact, True

    def _long_from(self, plan: StepPlan, longest: int) -> int:
        """Minimum number of tokens of a row that uses cuDNN attention; 0 for none. Only full chunks that follow full
        chunks: cuDNN needs 0.1 to 0.4 s of preparation per pair of lengths, and these few pairs are warmed up."""
        budget = self._token_budget
        if not self._takes_long_rows or longest != budget:
            return 0
        context = int(plan.starts[plan.counts.argmax()])
        return 0 if context % budget or self._warm_up.is_cold(self._buckets.chunk(context)) else budget

    def _unsplit_if_cold(self, bucket: Bucket) -> Bucket:
        """Falls back to an unsplit context until the split graph has been captured: compiling its kernels now would
        take far longer than the split saves."""
        return replace(bucket, parts=1) if bucket.parts > 1 and self._warm_up.is_cold(bucket) else bucket

    def _shares_prefix(self, plan: StepPlan) -> bool:
        return (
            self._can_share_prefix
            and len(plan.rows) >= MIN_SHARING_ROWS
            and self._writer.shared_tokens(plan) >= MIN_SHARED_TOKENS
        )

    def _finish(
        self, plan: StepPlan, draws: DrawPlan, logits: Tensor | None, prompt_logprobs: tuple[PromptLogprobs, ...]
    ) -> StepResult:
        """`logits`: the logits that tokens were drawn from; None if no row drew."""
        drawn = self._work.drawn(len(draws.due))
        logprobs: LogprobColumns | None = None
        scored, counts = draws.logprob_index, draws.logprob_counts
        if logits is not None and len(scored):
            index = torch.from_numpy(scored).to(logits.device, non_blocking=True)
            logprobs = score(logits[index], drawn.long()[index], max(1, int(counts.max())))
        return StepResult(plan.step_no, drawn, logprobs, scored, counts, prompt_logprobs)

    def _score_prompts(self, plan: StepPlan, hidden: Tensor) -> tuple[PromptLogprobs, ...]:
        if not self._table.scores_prompts(plan.rows):
            return ()
        query_starts = np.zeros(len(plan.rows) + 1, np.int32)
        np.cumsum(plan.counts, out=query_starts[1:])
        return score_prompts(plan, query_starts, self._table, self._decoder, hidden)


def _long_rows(plan: StepPlan, long_from: int) -> tuple[LongRow, ...]:
    if not long_from:
        return ()
    first_tokens = np.cumsum(plan.counts) - plan.counts
    return tuple(
        LongRow(index, int(first_tokens[index]), int(plan.counts[index]), int(plan.starts[index]))
        for index in np.flatnonzero(plan.counts >= long_from).tolist()
    )
