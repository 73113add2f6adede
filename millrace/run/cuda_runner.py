"""The GPU runner: executes a StepPlan with one copy in, graph replays for its body and its heads, and one copy out.

Nothing in it waits for the GPU, and the copies run beside the neighbouring steps. A step is padded to a bucket, whose
work (`graphs/step_work.py`) is replayed as a graph; each head group of its draw is another. A step that fits no bucket
runs the same code uncaptured at its exact size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from millrace.config import Speculation
from millrace.models.decoder import Decoder
from millrace.ops.attention import PagedAttention
from millrace.ops.attention.long_rows import CUDNN_MIN_QUERIES, LongRow, can_take_long_rows
from millrace.ops.tuning.load import num_multiprocessors
from millrace.plan.step import NO_EPOCH, BlockCopies, StepPlan
from millrace.run.device.block_copier import BlockCopier, OrderedCopier, StreamCopier
from millrace.run.device.device import Device, Pending
from millrace.run.device.kv_pool import KvFormat, allocate_kv
from millrace.run.drafting.device_drafts import DeviceDrafts, places_for
from millrace.run.graphs.buckets import Buckets
from millrace.run.graphs.graph_cache import GraphCache
from millrace.run.graphs.kernel_build_pool import KernelBuildPool
from millrace.run.graphs.step_work import UPDATES_IN_PACKET, Accept, StepWork
from millrace.run.graphs.warm_up import Part, WarmUp, build_order, capture_order, first_request_parts, placed_parts
from millrace.run.packet.step_packet import Bucket, PacketWriter, max_of, min_of
from millrace.run.runner import StepResult, copy_to_host
from millrace.run.sampling.device_sampler import DeviceSampler
from millrace.run.sampling.draw_plan import DrawPlan, Head, Variant, plan_draws
from millrace.run.sampling.logprobs import LogprobColumns, score
from millrace.run.sampling.masks import Masks, check_masks
from millrace.run.sampling.prompt_scores import PromptLogprobs, score_prompts
from millrace.run.table.request_table import RequestTable

MIN_SHARING_ROWS, MIN_SHARED_TOKENS = 16, 256
"""Minimum rows and shared-prefix tokens for which the shared-prefix kernels are worth their extra launch."""


HIDDEN_PER_SPLIT_ROW = 5
"""With fewer greedy rows than hidden_size / HIDDEN_PER_SPLIT_ROW, one head for all rows is faster: a second head reads
the LM head's matrix (2 bytes x hidden size per token of the vocabulary) again, to save the greedy rows' logits (4 bytes
per token, written once and read twice). H200: hidden size 1,024 is even at 128 rows and saves 36 us of 824 at 256;
2,560 loses 63 us at 256 and is even at 512."""


@dataclass(frozen=True, slots=True)
class Forwarded:
    """What a forward pass leaves for its draw, apart from the hidden states on the device."""

    draws: DrawPlan
    bucket: Bucket
    prompt_logprobs: tuple[PromptLogprobs, ...]


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
        speculate: Speculation = "off",
        host_slots: int = 0,
        max_copied: int = 1,
    ) -> None:
        """`host_slots`: KV blocks that host memory holds beside the pool; `max_copied`: those copied in one batch."""
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
        self._copier: BlockCopier | None = None
        if host_slots and torch_device.type == "cuda":
            self._copier = StreamCopier(self._kv, host_slots, device, max_blocks=max_copied)
        elif host_slots:
            self._copier = OrderedCopier(self._kv, host_slots, device)
        # The token budget, plus one token for each decode row beside it.
        max_tokens = token_budget + max_rows
        # A padding row reads as many block-table columns as its tokens need.
        max_blocks = max(min(num_blocks, -(-max_context // block_size)), -(-max_tokens // block_size))
        num_groups = spec.kv_groups.num_groups
        self._table = RequestTable(device, max_rows=max_rows + 1, max_blocks=max_blocks, num_groups=num_groups)
        self._sampler = DeviceSampler(device, self._table, max_rows=max_rows, vocab_size=spec.vocab_size)
        tile_decode_rows, per_tile = attention.tile_decode_rows, attention.queries_per_tile
        self._writer = PacketWriter(
            max_rows=max_rows,
            block_size=block_size,
            queries_per_tile=per_tile,
            tile_decode_rows=tile_decode_rows,
            has_drafts=speculate != "off",
        )
        self._drafts: DeviceDrafts | None = None
        if speculate != "off":
            self._drafts = DeviceDrafts(device, max_rows=max_rows + 1, max_context=max_context)
        self._max_rows, self._can_place_drafts = max_rows, not tile_decode_rows
        has_windows = any(window is not None for window in spec.windows)
        self.padded_tokens = 0
        """In all steps so far."""
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
            drafts=self._drafts,
        )
        self._forwarded: Callable[[], Forwarded] | None = None
        """The last forward pass."""
        self._draws: DrawPlan | None = None
        """The draw plan of the last step."""
        self._epoch = NO_EPOCH
        """Of the last step's plan."""
        self._graphs = GraphCache(self._buckets.decode_sizes, enabled=graphs)
        to_capture = self._all_parts(max_blocks * block_size) if graphs else []
        self._warm_up = WarmUp(
            self._work,
            self._graphs,
            to_capture=to_capture,
            to_build=build_order(self._buckets, to_capture) if graphs else [],
            first=first_request_parts(self._buckets),
            build_pool=build_pool,
        )

    def _all_parts(self, max_context: int) -> list[Part]:
        """Everything to capture during warm-up, in order."""
        usual = capture_order(self._buckets, sharing_from=MIN_SHARING_ROWS if self._can_share_prefix else None)
        max_states = self._max_rows if self._can_place_drafts else 0
        placed = placed_parts(self._buckets, max_states) if self._drafts is not None else []
        return placed + usual + (self._buckets.chunks(max_context) if self._takes_long_rows else [])

    def copy(self, copies: BlockCopies) -> Pending[float]:
        if self._copier is None:
            raise AssertionError("there is no host memory for KV blocks")
        return self._copier.copy(copies)

    @property
    def is_warm(self) -> bool:
        return self._warm_up.is_done

    @property
    def num_cold(self) -> int:
        return self._warm_up.num_cold

    def warm_next(self) -> None:
        self._warm_up.warm_next()

    def launch(self, plan: StepPlan) -> Pending[StepResult]:
        self.forward(plan)
        return self.draw(plan, None)

    def forward(self, plan: StepPlan) -> None:
        self._forwarded = self._device.queue(lambda: self._forward(plan))

    def draw(self, plan: StepPlan, masks: Masks | None) -> Pending[StepResult]:
        forwarded = self._forwarded
        assert forwarded is not None, "a draw follows the forward pass of its step"
        return self._device.launch(lambda: self._draw(plan, forwarded(), masks), self._copy_to_host)

    def _forward(self, plan: StepPlan) -> Forwarded:
        self._table.update_host(plan)
        self._sampler.update(plan)
        if self._drafts is not None:
            self._drafts.admit(plan)
        repeats, self._epoch = plan.repeats(self._epoch), plan.epoch
        draws, work = self._draw_plan(plan, repeats), self._work
        records = self._sampler.records(plan)
        plan = self._table.send_excess_blocks(plan, UPDATES_IN_PACKET)
        bucket, exact = self._bucket_for(plan, 1 if repeats else max_of(plan.counts))
        if bucket.is_decode:
            bucket = self._with_graph(bucket)
        self.padded_tokens += max(0, bucket.tokens - (len(plan.rows) if repeats else plan.num_tokens))
        work.send(plan, bucket, draws, records)
        if plan.draft_places is not None and not bucket.places:
            work.place_drafts(bucket)
        if exact:
            hidden = work.body(bucket, long_rows=_long_rows(plan, bucket.long_from), drawn_only=False)
        else:
            hidden = self._graphs.run(bucket, partial(work.body, bucket))
        return Forwarded(draws, bucket, self._score_prompts(plan, hidden))

    def _copy_to_host(self, result: StepResult) -> StepResult:
        host = copy_to_host(result, *self._work.drawn_on_host(len(result.tokens)))
        if not result.places:
            return host
        counts, into, view = self._work.counts(len(result.tokens) // result.places)
        into.copy_(counts, non_blocking=True)
        return replace(host, counts=view)

    def _draw(self, plan: StepPlan, forwarded: Forwarded, masks: Masks | None) -> StepResult:
        draws, bucket, work = forwarded.draws, forwarded.bucket, self._work
        check_masks(masks, draws.masked)
        if masks is not None:
            work.send_masks(masks)
        logits: Tensor | None = None
        for variant, count in draws.groups:
            head = self._head(variant, count * bucket.tokens_per_row)
            logits = self._graphs.run(head, partial(work.head, head))
        places = bucket.tokens_per_row
        drawn, logprobs = work.drawn(len(draws.due) * places), None
        if len(draws.shaped):
            self._draw_shaped(plan, draws, drawn, places)
        if logits is not None and len(draws.scored):
            logprobs = self._score(draws, logits, drawn, places)
        result = StepResult(plan.step_no, drawn, logprobs, draws.scored, draws.num_logprobs, forwarded.prompt_logprobs)
        if self._drafts is None or not len(draws.due):
            return result
        self._graphs.run(Accept.of(bucket), partial(work.accept_drafts, bucket))
        if plan.draft_places is None:
            return result
        # On a CPU the device's memory is the host's, and nothing is copied.
        counts = None if self._device.kind == "cuda" else work.counts(len(draws.due))[0].numpy()
        return replace(result, places=places, counts=counts)

    def _draw_shaped(self, plan: StepPlan, draws: DrawPlan, drawn: Tensor, places: int) -> None:
        """Replace the head's tokens of shaped rows. Those have no drafts, so the plan has their true positions, and
        theirs is the first place."""
        due = draws.due[draws.shaped]
        tokens = self._sampler.draw_shaped(plan.rows[due], (plan.starts + plan.counts)[due])
        drawn[self._device.upload(draws.shaped * places)] = tokens.to(drawn.dtype)

    def _with_graph(self, bucket: Bucket) -> Bucket:
        """The decode bucket whose graph to run. After a fallback, the right one is captured when the engine is idle."""
        decode = partial(self._buckets.decode, shares_prefix=bucket.shares_prefix, places=bucket.places)
        size = self._graphs.choose_size(bucket.rows, decode)
        if size == bucket.rows:
            return bucket
        self._warm_up.capture_next(bucket)
        return decode(size)

    def _head(self, variant: Variant, num_states: int) -> Head:
        """The head whose graph to run, with the same fallback."""
        wanted = self._buckets.decode(num_states).rows
        size = self._graphs.choose_size(wanted, lambda size: Head(size, variant))
        if size != wanted:
            self._warm_up.capture_next(Head(wanted, variant))
        return Head(size, variant)

    def _draw_plan(self, plan: StepPlan, repeats: bool) -> DrawPlan:
        last = self._draws
        if repeats and plan.masked is None and last is not None and last.is_reusable:
            return last
        self._draws = draws = plan_draws(plan, self._sampler.row_params, self._is_worth_splitting)
        self._sampler.keep_raw_logits(plan.rows[draws.due], draws)
        return draws

    def _is_worth_splitting(self, num_greedy: int) -> bool:
        min_rows = self._decoder.spec.hidden_size / HIDDEN_PER_SPLIT_ROW
        return num_greedy >= min_rows and self._decoder.draws(self._buckets.decode(num_greedy).rows)

    def _bucket_for(self, plan: StepPlan, longest: int) -> tuple[Bucket, bool]:
        """(bucket, is_exact). Steps that are rare or fit no bucket run uncaptured at their exact size. `longest`: most
        tokens of a row."""
        num_rows = len(plan.rows)
        scores_prompts = self._table.scores_prompts(plan.rows)
        if plan.draft_places is not None and longest == 1 and plan.samples.all():
            return self._buckets.decode(num_rows, places=self._places(plan)), False
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

    def _places(self, plan: StepPlan) -> int:
        """Places of each row of a step in which every row decodes."""
        assert plan.draft_places is not None
        wanted = 1 + max_of(plan.draft_places) if self._can_place_drafts else 1
        return places_for(wanted, self._buckets.decode(len(plan.rows)).rows, self._max_rows)

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

    def _score(self, draws: DrawPlan, logits: Tensor, drawn: Tensor, places: int) -> LogprobColumns:
        """`logits`: those of the full group, whose states are the last ones of its head. Scored rows have no drafts:
        theirs is the first place."""
        states = len(logits) - (len(draws.full) - np.searchsorted(draws.full, draws.scored)) * places
        index = torch.from_numpy(np.stack([states, draws.scored * places])).to(logits.device, non_blocking=True)
        return score(logits[index[0]], drawn.long()[index[1]], max(1, int(draws.num_logprobs.max())))

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
