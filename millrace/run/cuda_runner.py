"""Executes StepPlans on a GPU: one copy in, one or two graph replays, one copy out, and the host is free. The copies go
beside the steps before and after.

A step is padded to a bucket, whose work (`step_work.py`) is replayed as a graph (`step_graphs.py`): one graph for body
and head where every row has one token and draws, else one each. A step that fits no bucket runs the same code
uncaptured, in its exact size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from millrace.models.decoder import Decoder
from millrace.ops.attention import PagedAttention
from millrace.ops.attention.long_rows import WORTH_IT, LongRow, can_take_long_rows
from millrace.ops.tuning.load import num_multiprocessors
from millrace.plan.step import Int32s, Int64s, StepPlan
from millrace.run.device.device import Device, Pending
from millrace.run.device.kv_pool import KvFormat, allocate_kv
from millrace.run.graphs.buckets import Buckets
from millrace.run.graphs.graph_cache import StepGraphs
from millrace.run.graphs.kernel_build_pool import KernelBuilder
from millrace.run.graphs.step_work import UPDATES_IN_PACKET, StepWork
from millrace.run.graphs.warm_up import WarmUp, of_first_requests, usual_first
from millrace.run.packet.step_packet import Bucket, PacketWriter, least_of, most_of
from millrace.run.runner import StepResult, bring_back
from millrace.run.sampling.device_sampler import DeviceSampler, Variant
from millrace.run.sampling.logprobs import LogprobColumns, score
from millrace.run.sampling.prompt_scores import PromptLogprobs, score_prompts
from millrace.run.table.request_table import RequestTable

SHARING_ROWS, SHARING_TOKENS = 16, 256
"""Rows and common tokens from which reading the common ones once for all rows is worth its own launch."""


@dataclass(frozen=True, slots=True)
class Draws:
    """Which of a step's rows draw, and how. A step that repeats it has the same."""

    due: Int64s
    variant: Variant
    is_final: bool
    """The variant is the same however long the rows become."""
    logprob_index: Int64s
    """Which of the drawn tokens have log-probabilities, and with how many likeliest tokens each."""
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
        builder: KernelBuilder | None = None,
    ) -> None:
        attention, place, spec = decoder.attention, device.torch_device, decoder.spec
        if not isinstance(attention, PagedAttention):
            raise TypeError("CudaRunner needs paged attention")
        graphs = graphs and place.type == "cuda"
        self._decoder, self._device, self._token_budget = decoder, device, token_budget
        self._kv = allocate_kv(
            spec, num_blocks=num_blocks, block_size=block_size, dtype=decoder.dtype, device=place, kv_dtype=kv_dtype
        )
        # What the budget counts, and a token of each row that decodes beside it.
        most_tokens = token_budget + max_rows
        # Padding rows read as many columns as they have tokens.
        most_blocks = max(min(num_blocks, -(-max_context // block_size)), -(-most_tokens // block_size))
        self._table = RequestTable(device, max_rows=max_rows + 1, max_blocks=most_blocks)
        self._sampler = DeviceSampler(device, self._table, max_rows=max_rows, vocab_size=spec.vocab_size)
        tile_singles, per_tile = attention.everything_tiled, attention.queries_per_tile
        self._writer = PacketWriter(
            max_rows=max_rows, block_size=block_size, queries_per_tile=per_tile, tile_singles=tile_singles
        )
        has_windows = any(window is not None for window in spec.windows)
        self._buckets = Buckets(
            max_rows=max_rows,
            token_budget=token_budget,
            queries_per_tile=per_tile,
            tile_singles=tile_singles,
            split_heads=0 if has_windows else spec.num_kv_heads,
            num_multiprocessors=num_multiprocessors(place),
        )
        self._can_share = not tile_singles and not has_windows
        self._takes_long_rows = (
            not tile_singles
            and token_budget >= WORTH_IT
            and not has_windows
            and can_take_long_rows(place, decoder.dtype, spec.head_dim, spec.attention_softcap)
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
            most_tokens=most_tokens,
            tile_singles=tile_singles,
        )
        self._draws: Draws | None = None
        """Of the last step."""
        self._graphs = StepGraphs(self._buckets.decode_sizes, wanted=graphs)
        self._warm_up = WarmUp(
            self._work,
            self._graphs,
            to_capture=self._all_buckets(most_blocks * block_size) if graphs else [],
            first=of_first_requests(self._buckets),
            builder=builder,
        )

    def _all_buckets(self, most_context: int) -> list[Bucket]:
        """In the order in which they are captured ahead of need."""
        usual = usual_first(self._buckets, sharing_from=SHARING_ROWS if self._can_share else None)
        return usual + (self._buckets.chunks(most_context) if self._takes_long_rows else [])

    @property
    def is_warm(self) -> bool:
        return self._warm_up.is_done

    @property
    def num_cold(self) -> int:
        return self._warm_up.num_cold

    def warm_next(self) -> None:
        self._warm_up.go_on()

    def launch(self, plan: StepPlan) -> Pending[StepResult]:
        """Queue the step. Steps run in the order of their launches."""
        return self._device.launch(lambda: self._execute(plan), self._bring_back)

    def _bring_back(self, result: StepResult) -> StepResult:
        return bring_back(result, *self._work.drawn_here(len(result.tokens)))

    def _execute(self, plan: StepPlan) -> StepResult:
        self._table.note(plan)
        records = self._sampler.records(plan)
        plan = self._table.send_excess(plan, UPDATES_IN_PACKET)
        bucket, exact = self._bucket_for(plan)
        draws, work = self._draws_of(plan), self._work
        variant, num_drawn = draws.variant, len(draws.due)
        is_whole = bucket.is_decode and num_drawn == len(plan.rows)
        if is_whole:
            shares = bucket.shares
            bucket = self._near(bucket, lambda size: (self._buckets.decode(size, shares=shares), variant))
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
        size = self._near(self._buckets.decode(num_drawn), lambda size: (size, variant)).rows
        logits = self._graphs.run((size, variant), lambda: work.head(size, variant))
        return self._finish(plan, draws, logits, prompt_logprobs)

    def _near(self, bucket: Bucket, key_of: Callable[[int], object]) -> Bucket:
        """The decode bucket whose graph a step takes; if that is another, its own is captured in an idle moment."""
        size = self._graphs.near(bucket.rows, key_of)
        if size == bucket.rows:
            return bucket
        self._warm_up.want(bucket)
        return self._buckets.decode(size, shares=bucket.shares)

    def _draws_of(self, plan: StepPlan) -> Draws:
        last = self._draws
        if plan.is_repeated_decode and last is not None and last.is_final:
            return last
        due, sampler = plan.samples.nonzero()[0], self._sampler
        rows = plan.rows[due]
        variant = sampler.variant_for(rows, (plan.starts + plan.counts)[due])
        is_final = variant == "greedy" or sampler.needs_full(rows)
        scored = np.flatnonzero(sampler.num_logprobs[rows] >= 0)
        self._draws = draws = Draws(due, variant, is_final, scored, sampler.num_logprobs[rows[scored]])
        return draws

    def _bucket_for(self, plan: StepPlan) -> tuple[Bucket, bool]:
        """The step's bucket; or its exact size, not to be captured, for steps that are rare or fit no bucket."""
        num_rows, longest = len(plan.rows), 1 if plan.is_repeated_decode else most_of(plan.counts)
        scores_prompts = self._table.scores_prompts(plan.rows)
        if longest == 1 and not scores_prompts:
            return self._buckets.decode(num_rows, shares=self._shares(plan)), False
        num_tokens = plan.num_tokens
        long_from = self._long_from(plan, longest)
        if long_from and num_rows == 1 and not scores_prompts:
            return self._buckets.chunk(int(plan.starts[0])), False
        tiles = self._writer.num_tiles(plan.counts, long_from)
        if not long_from and not scores_prompts:
            has_singles, context = least_of(plan.counts) == 1, most_of(plan.starts)
            bucket = self._buckets.mixed(num_tokens, num_rows, tiles, has_singles=has_singles, context=context)
            if bucket is not None:
                return self._unless_cold(bucket), False
        last_only = not scores_prompts and self._buckets.last_only(num_tokens, num_rows)
        exact = Bucket(num_tokens, num_rows, tiles, is_decode=False, long_from=long_from, last_only=last_only)
        return exact, True

    def _long_from(self, plan: StepPlan, longest: int) -> int:
        """The least number of a row's tokens with which it goes to the library; 0 for none. These are whole chunks that
        follow on whole chunks: the library prepares itself for every pair of lengths, which takes it 0.1 to 0.4 s, and
        of these there are few, for which that has been done."""
        budget = self._token_budget
        if not self._takes_long_rows or longest != budget:
            return 0
        context = int(plan.starts[plan.counts.argmax()])
        return 0 if context % budget or self._warm_up.is_waiting(self._buckets.chunk(context)) else budget

    def _unless_cold(self, bucket: Bucket) -> Bucket:
        """The same in one part as long as that in several waits for its turn to be captured: its kernels may not have
        been compiled, which takes far longer than they save."""
        return replace(bucket, parts=1) if bucket.parts > 1 and self._warm_up.is_waiting(bucket) else bucket

    def _shares(self, plan: StepPlan) -> bool:
        return self._can_share and len(plan.rows) >= SHARING_ROWS and self._writer.shared_tokens(plan) >= SHARING_TOKENS

    def _finish(
        self, plan: StepPlan, draws: Draws, logits: Tensor | None, prompt_logprobs: tuple[PromptLogprobs, ...]
    ) -> StepResult:
        """`logits` are what the rows drew from, if any did."""
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
