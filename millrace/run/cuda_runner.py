"""Executes StepPlans on a GPU: one copy in, one or two graph replays, one copy out, and the host is free. The copies go
beside the steps before and after.

A step has two parts. The body turns the packet into hidden states of the rows that draw; the head turns those into
tokens. Both work on buffers that never move, padded to a bucket, and are captured as CUDA graphs the second time their
bucket is met (the first run compiles and warms what they launch): one graph for both where every row has one token and
draws, else one each. A step that fits no bucket runs the same code uncaptured, in its exact size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from millrace.models.batch import DrawnStates, ForwardBatch, LastTokens
from millrace.models.decoder import Decoder
from millrace.ops.attention import PagedAttention
from millrace.ops.attention.long_rows import WORTH_IT, LongRow, can_take_long_rows
from millrace.ops.linear import DrawnTokens
from millrace.ops.triton.prebuild import current_target, rehearsal
from millrace.ops.triton.sampling import ROW_WORDS
from millrace.ops.triton.step_inputs import Updates, gather
from millrace.plan.step import Int32s, Int64s, StepPlan
from millrace.run.buckets import Buckets
from millrace.run.device import Device, Pending
from millrace.run.device_sampler import VARIANTS, DeviceSampler, Variant
from millrace.run.kernel_builder import REPLY_LIMIT_S, KernelBuilder
from millrace.run.kv_pool import KvFormat, allocate_kv
from millrace.run.logprobs import LogprobColumns, score
from millrace.run.near_sizes import NearSizes
from millrace.run.packet_ring import DrawnRing, PacketRing
from millrace.run.prompt_scores import PromptLogprobs, score_prompts
from millrace.run.request_table import RequestTable
from millrace.run.runner import StepResult, bring_back
from millrace.run.single_queries import COLUMNS, num_words
from millrace.run.step_packet import ALIGN, Bucket, PacketWriter, Section, least_of, most_of
from millrace.run.token_tables import token_tables

log = logging.getLogger(__name__)

UPDATES_IN_PACKET = 1 << 15
SHARING_ROWS, SHARING_TOKENS = 16, 256
"""Rows and common tokens from which reading the common ones once for all rows is worth its own launch."""
HOT_DECODE = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Decode sizes captured first; others follow when the engine is idle or when they are met."""
FIRST_TOKENS = 128
"""Prompts up to so many tokens find their kernels compiled when the engine says that it is ready."""
BUILT_AT_ONCE = 4
"""Buckets whose kernels are compiled together in an idle moment."""
ORDER_POLL_S = 0.002


@dataclass(slots=True)
class Captured:
    graph: torch.cuda.CUDAGraph
    output: Tensor


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
        attention = decoder.attention
        if not isinstance(attention, PagedAttention):
            raise TypeError("CudaRunner needs paged attention")
        place = device.torch_device
        spec = decoder.spec
        pinned = place.type == "cuda"
        graphs = graphs and pinned
        self._decoder, self._device, self._block_size = decoder, device, block_size
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
        self._tile_singles = tile_singles
        has_windows = any(window is not None for window in spec.windows)
        self._buckets = Buckets(
            max_rows=max_rows,
            token_budget=token_budget,
            queries_per_tile=per_tile,
            tile_singles=tile_singles,
            split_heads=0 if has_windows else spec.num_kv_heads,
        )
        self._can_share = not tile_singles and not has_windows
        self._takes_long_rows = (
            not tile_singles
            and token_budget >= WORTH_IT
            and not has_windows
            and can_take_long_rows(place, decoder.dtype, spec.head_dim, spec.attention_softcap)
        )
        self._max_rows, self._token_budget, self._most_context = max_rows, token_budget, most_blocks * block_size
        words = 4 * max_rows + 8 * (max_rows + 32) + num_words(max_rows + 1)
        words += 6 * most_tokens + 3 * UPDATES_IN_PACKET + 512
        self._ring = PacketRing(words + max_rows * ROW_WORDS, place)
        self._packet = self._ring.on_device
        self._token_ids = torch.zeros(most_tokens, dtype=torch.int64, device=place)
        self._positions = torch.zeros_like(self._token_ids)
        self._slots = torch.zeros_like(self._token_ids)
        self._block_ids, self._offsets = torch.zeros_like(self._token_ids), torch.zeros_like(self._token_ids)
        # Padding takes as many positions as it has tokens.
        self._looked_up = token_tables(decoder, max(max_context, most_tokens))
        self._sampled = torch.zeros((max_rows, spec.hidden_size), dtype=decoder.dtype, device=place)
        self._logits = torch.empty((max_rows, spec.vocab_size), dtype=torch.float32, device=place)
        self._drawn = DrawnRing(max_rows, place)
        self._count = torch.arange(max_rows + 2, dtype=torch.int32, device=place)
        self._use_graphs = graphs
        self._pool = torch.cuda.graph_pool_handle() if graphs else None
        self._met: set[object] = set()
        self._captured: dict[object, Captured] = {}
        self._near_sizes, self._missed = NearSizes(self._buckets.decode_sizes), set[Bucket]()
        self._draws: Draws | None = None
        """Of the last step."""
        self._to_warm = self._warm_list() if graphs else []
        self._builder, self._to_build = builder, list[Bucket]()
        if builder is not None:
            self._build_first(builder)

    # -- a step ----------------------------------------------------------------------------------------------------

    def launch(self, plan: StepPlan) -> Pending[StepResult]:
        """Queue the step. Steps run in the order of their launches."""
        return self._device.launch(lambda: self._execute(plan), self._bring_back)

    def _bring_back(self, result: StepResult) -> StepResult:
        turn, count = self._ring.turn, len(result.tokens)
        return bring_back(result, self._drawn.host_line(turn, count), self._drawn.host_view(turn, count))

    def _execute(self, plan: StepPlan) -> StepResult:
        self._table.note(plan)
        records = self._sampler.records(plan)
        plan = self._table.send_excess(plan, UPDATES_IN_PACKET)
        bucket, exact = self._bucket_for(plan)
        draws = self._draws_of(plan)
        variant, num_drawn = draws.variant, len(draws.due)
        is_whole = bucket.is_decode and num_drawn == len(plan.rows)
        if is_whole:
            shares = bucket.shares
            bucket = self._near(bucket, lambda size: (self._buckets.decode(size, shares=shares), variant))
        self._send(plan, bucket, records)
        if is_whole:
            logits = self._run((bucket, variant), lambda: self._whole(bucket, variant), False)
            return self._finish(plan, draws, logits, ())
        long_rows = _long_rows(plan, bucket.long_from) if exact and bucket.long_from else None
        hidden = self._run(bucket, lambda: self._body(bucket, long_rows=long_rows, drawn_only=not exact), exact)
        prompt_logprobs = self._score_prompts(plan, hidden)
        if num_drawn == 0:
            return self._finish(plan, draws, None, prompt_logprobs)
        size = self._near(self._buckets.decode(num_drawn), lambda size: (size, variant)).rows
        logits = self._run((size, variant), lambda: self._head(size, variant), False)
        return self._finish(plan, draws, logits, prompt_logprobs)

    def _near(self, bucket: Bucket, key_of: Callable[[int], object]) -> Bucket:
        """The decode bucket whose graph a step takes; if that is another, its own is captured in an idle moment."""
        if not self._use_graphs:
            return bucket
        size = self._near_sizes.choose(bucket.rows, key_of, self._captured)
        if size == bucket.rows:
            return bucket
        if bucket not in self._missed:
            self._missed.add(bucket)
            self._to_warm.insert(0, bucket)
        return self._buckets.decode(size, shares=bucket.shares)

    def _draws_of(self, plan: StepPlan) -> Draws:
        last = self._draws
        if plan.repeats and last is not None and last.is_final:
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
        num_rows, longest = len(plan.rows), 1 if plan.repeats else most_of(plan.counts)
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
        return 0 if context % budget or self._buckets.chunk(context) in self._to_warm else budget

    def _unless_cold(self, bucket: Bucket) -> Bucket:
        """The same in one part as long as that in several waits for its turn to be captured: its kernels may not have
        been compiled, which takes far longer than they save."""
        return replace(bucket, parts=1) if bucket.parts > 1 and bucket in self._to_warm else bucket

    def _shares(self, plan: StepPlan) -> bool:
        return self._can_share and len(plan.rows) >= SHARING_ROWS and self._writer.shared_tokens(plan) >= SHARING_TOKENS

    def _send(self, plan: StepPlan | None, bucket: Bucket, records: Int32s | None = None) -> None:
        packet, drawn_start = self._ring.next(), self._drawn.start(self._ring.turn)
        self._ring.send(self._writer.write(plan, self._table, bucket, packet, records, drawn_start))

    def _body(
        self,
        bucket: Bucket,
        decoder: Decoder | None = None,
        long_rows: tuple[LongRow, ...] | None = None,
        *,
        drawn_only: bool = True,
    ) -> Tensor:
        """From the packet to hidden states: those that precede a draw, gathered for the head. Unless these are all that
        is wanted, those of all tokens, or of each row's last, are returned. Where no `long_rows` are named, they are
        the bucket's own."""
        decoder = decoder or self._decoder
        layout, packet = self._writer.layout(bucket), self._packet

        def part(section: Section) -> Tensor:
            return packet[section.start : section.start + section.length]

        batch = self._gathered(bucket, part)
        batch.tiles = part(layout.tiles).view(-1, 2) if bucket.tiles else None
        batch.has_singles = bucket.has_singles and not self._tile_singles
        batch.long_rows = _own_long_rows(bucket) if long_rows is None else long_rows
        batch.context_parts = bucket.parts
        batch.shared_len = part(layout.shared_len) if bucket.shares else None
        if batch.has_singles and layout.singles.length:
            batch.singles = part(layout.singles).view(COLUMNS, -1)
        if bucket.last_only:
            batch.last = self._last_tokens(batch, part(layout.last_tokens))
        most = min(bucket.rows if bucket.last_only else bucket.tokens, self._max_rows)
        index, out = part(layout.sample_states)[:most], self._sampled[:most]
        if drawn_only:
            batch.drawn = DrawnStates(index, out)
            return decoder.forward(batch, self._kv)
        hidden = decoder.forward(batch, self._kv)
        torch.index_select(hidden, 0, index, out=out)
        return hidden

    def _gathered(self, bucket: Bucket, part: Callable[[Section], Tensor]) -> ForwardBatch:
        """The step's inputs, made by the packet's first kernels."""
        layout, table, size = self._writer.layout(bucket), self._table, bucket.tokens
        query_starts, table_rows = part(layout.query_starts), part(layout.table_rows)
        columns = (self._token_ids, self._positions, self._slots, self._block_ids, self._offsets)
        token_ids, positions, slots, block_ids, offsets = (column[:size] for column in columns)
        updates = Updates(
            triples=self._packet[layout.updates_start :],
            num_triples=part(layout.num_updates),
            num_records=part(layout.num_records),
            columns=self._sampler.columns,
            align=ALIGN,
        )
        embedded, angles = gather(
            tokens_in=part(layout.tokens_in),
            token_rows=None if bucket.is_decode else part(layout.token_rows),
            table_rows=table_rows,
            starts=part(layout.starts),
            query_starts=query_starts,
            last_tokens=table.last_tokens,
            tables=table.block_tables,
            updates=updates,
            block_size=self._block_size,
            looked_up=self._looked_up,
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            block_ids=block_ids,
            offsets=offsets,
        )
        return ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            query_starts=query_starts,
            seq_lens=part(layout.seq_lens),
            block_tables=table.block_tables,
            max_query_len=0,
            max_seq_len=0,
            query_starts_host=[],
            seq_lens_host=[],
            table_rows=table_rows,
            places=(block_ids, offsets),
            embedded=embedded,
            angles=None if angles is None else angles.unbind(0),
        )

    def _last_tokens(self, batch: ForwardBatch, index: Tensor) -> LastTokens:
        return LastTokens(
            index=index,
            query_starts=self._count[: len(index) + 1],
            seq_lens=batch.seq_lens,
            block_tables=batch.block_tables,
            query_starts_host=[],
            seq_lens_host=[],
            table_rows=batch.table_rows,
        )

    def _head(self, size: int, variant: Variant) -> Tensor:
        """Logits [size, vocab] of the gathered rows, or none of them where tokens are found without; what was drawn is
        in the packet's line of `_drawn`."""
        layout = self._writer.layout(self._buckets.decode(1))
        rows = self._packet[layout.sample_rows.start :][:size]
        positions = self._packet[layout.sample_positions.start :][:size]
        drawn_start = self._packet[layout.drawn_start.start :][:1]
        if variant == "greedy" and self._decoder.draws(size):
            to = DrawnTokens(rows, self._drawn.on_device, drawn_start, self._table.last_tokens)
            self._decoder.draw(self._sampled[:size], to)
            return self._logits[:0]
        logits = self._decoder.logits(self._sampled[:size], self._logits[:size])
        self._sampler.draw(logits, rows, positions, self._drawn.on_device, variant, drawn_start)
        return logits

    def _whole(self, bucket: Bucket, variant: Variant) -> Tensor:
        """A step in which every row draws: what `_head` returns."""
        self._body(bucket)
        return self._head(bucket.rows, variant)

    def _finish(
        self, plan: StepPlan, draws: Draws, logits: Tensor | None, prompt_logprobs: tuple[PromptLogprobs, ...]
    ) -> StepResult:
        """`logits` are what the rows drew from, if any did."""
        drawn = self._drawn.line(self._ring.turn, len(draws.due))
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

    # -- capture ---------------------------------------------------------------------------------------------------

    def _run(self, key: object, work: Callable[[], Tensor], exact: bool) -> Tensor:
        captured = self._captured.get(key)
        if captured is None and self._use_graphs and not exact:
            if key in self._met:
                captured = self._capture(key, work)
            self._met.add(key)
        if captured is None:
            return work()
        captured.graph.replay()
        return captured.output

    def _capture(self, key: object, work: Callable[[], Tensor]) -> Captured | None:
        """None, and no further captures, where this one fails: the same work can still be launched kernel by kernel."""
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                output = work()
        except Exception:
            log.warning(
                "A step could not be captured as a CUDA graph; new ones are launched uncaptured.", exc_info=True
            )
            self._use_graphs = False
            self._to_warm.clear()
            return None
        self._captured[key] = captured = Captured(graph, output)
        return captured

    def _warm_list(self) -> list[Bucket]:
        """Buckets to capture ahead of need, last first."""
        hot = [size for size in self._buckets.decode_sizes if size in HOT_DECODE]
        rest = [size for size in self._buckets.decode_sizes if size not in HOT_DECODE]
        ordered = [self._buckets.decode(size) for size in hot] + self._buckets.all_mixed() + self._all_sharing(hot)
        ordered += [self._buckets.decode(size) for size in rest] + self._buckets.all_split() + self._all_sharing(rest)
        if self._takes_long_rows:
            ordered += self._buckets.chunks(self._most_context)
        return ordered[::-1]

    def _all_sharing(self, sizes: list[int]) -> list[Bucket]:
        wanted = [size for size in sizes if self._can_share and size >= SHARING_ROWS]
        return [self._buckets.decode(size, shares=True) for size in wanted]

    @property
    def is_warm(self) -> bool:
        return not self._to_warm and self._builder is None

    @property
    def num_cold(self) -> int:
        return len(self._to_warm)

    # -- kernels ahead of need -------------------------------------------------------------------------------------

    def _build_first(self, builder: KernelBuilder) -> None:
        """What a short first request needs; the rest follows in idle moments."""
        mixed = [bucket for bucket in self._buckets.all_mixed() if bucket.tokens <= FIRST_TOKENS]
        self._to_build = list(self._to_warm)
        self._order(builder, [self._buckets.decode(1), *mixed], VARIANTS[:1])
        builder.is_done(REPLY_LIMIT_S)

    @torch.inference_mode()
    def _order(self, builder: KernelBuilder, buckets: list[Bucket], variants: tuple[Variant, ...]) -> None:
        """Have the kernels compiled that these buckets launch, each as soon as it is met."""
        try:
            target = current_target()
            place, thin = (target.backend, target.arch, target.warp_size), self._decoder.thin()
            with rehearsal(lambda kernel: builder.order(kernel, place)):
                for bucket in buckets:
                    self._send(None, bucket)  # the library's own kernels do run, and read what is there
                    self._body(bucket, thin)
                    for variant in variants if bucket.is_decode else ():
                        self._head(bucket.rows, variant)
        except Exception:
            log.warning("Kernels are compiled one by one, as they are met.", exc_info=True)
            self._to_build.clear()

    def _build_next(self, builder: KernelBuilder) -> None:
        """One order after the other, without waiting: a request may come at any moment."""
        if not builder.is_done(ORDER_POLL_S):
            return
        if self._to_build:
            buckets, self._to_build = self._to_build[-BUILT_AT_ONCE:], self._to_build[:-BUILT_AT_ONCE]
            self._order(builder, buckets, VARIANTS)
        else:
            builder.finish()
            self._builder = None

    @torch.inference_mode()
    def warm_next(self) -> None:
        """Compile and capture what one more bucket needs, on a step of padding. A few tens of milliseconds; seconds
        where a kernel has never been compiled on this machine."""
        if self._builder is not None:
            return self._build_next(self._builder)
        bucket = self._to_warm.pop()
        if bucket in self._captured:
            return
        try:
            self._warm(bucket)
        except Exception:  # nobody waits for it; a step that needs it says what is wrong
            log.warning("Steps are no longer captured ahead of need.", exc_info=True)
            self._to_warm.clear()

    def _warm(self, bucket: Bucket) -> None:
        self._send(None, bucket)
        if bucket.long_from:  # a layer of each kind is enough to be prepared, and whole steps of it would be long
            self._body(bucket, self._decoder.thin())
            self._capture(bucket, lambda: self._body(bucket))
            return None
        if not bucket.is_decode:
            return self._warm_run(bucket, lambda: self._body(bucket))
        size = bucket.rows
        # Most requests are sampled, but a graph takes memory and time: only the usual sizes are captured for that, and
        # those that were missed.
        for variant in VARIANTS if size in HOT_DECODE or bucket in self._missed else VARIANTS[:1]:
            if not bucket.shares:  # the head alone is for steps of prompts
                self._warm_run((size, variant), partial(self._head, size, variant))
            self._warm_run((bucket, variant), partial(self._whole, bucket, variant))

    def _warm_run(self, key: object, work: Callable[[], Tensor]) -> None:
        for _ in range(2):
            self._run(key, work, False)


def _own_long_rows(bucket: Bucket) -> tuple[LongRow, ...]:
    return (LongRow(0, 0, bucket.tokens, bucket.context),) if bucket.long_from and bucket.rows == 1 else ()


def _long_rows(plan: StepPlan, long_from: int) -> tuple[LongRow, ...]:
    first_tokens = np.cumsum(plan.counts) - plan.counts
    return tuple(
        LongRow(index, int(first_tokens[index]), int(plan.counts[index]), int(plan.starts[index]))
        for index in np.flatnonzero(plan.counts >= long_from).tolist()
    )
