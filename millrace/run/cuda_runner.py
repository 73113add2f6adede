"""The GPU runner: executes a StepPlan with one copy in, graph replays for its body and its heads, and one copy out.

Nothing in it waits for the GPU, and the copies run beside the neighbouring steps. A step is padded to the shape in its
plan, whose work (`graphs/step_work.py`) is replayed as a graph; each head group of its draw is another. A step of exact
shape runs the same code uncaptured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from millrace.models.adapters.read import Adapter
from millrace.models.adapters.slots import AdapterSlots
from millrace.models.decoder import Decoder
from millrace.ops.attention.long_rows import LongRow
from millrace.ops.triton.drafts import NUM_COUNTS
from millrace.plan.shapes.declared import DeclaredShapes
from millrace.plan.step import (
    NO_EPOCH,
    BlockCopies,
    CapturePlan,
    HeadShape,
    Int32s,
    StepInputs,
    StepPlan,
    StepShape,
)
from millrace.run.device.adapter_slots import IsReady
from millrace.run.device.block_contents import BlockContents
from millrace.run.device.device import Device, Pending
from millrace.run.device.host_blocks import HostBlocks
from millrace.run.device.token_placing import TokenPlacing
from millrace.run.drafting.device_drafts import drafts_of, masks_drafts
from millrace.run.drafting.models import DrafterModel
from millrace.run.facts import RunnerFacts
from millrace.run.graphs.device_state import make_copier, make_device_state, make_filler
from millrace.run.graphs.graph_cache import GraphCache
from millrace.run.graphs.kernel_build_pool import KernelBuildPool
from millrace.run.graphs.shape_facts import shape_facts
from millrace.run.graphs.step_work import UPDATES_IN_PACKET, Accept, StepWork
from millrace.run.graphs.warm_up import WarmUp
from millrace.run.packet.packet_ring import RING
from millrace.run.packet.step_packet import PacketWriter
from millrace.run.protocol import StepResult, copy_to_host
from millrace.run.sampling.draw_plan import DrawPlan, plan_draws
from millrace.run.sampling.logprobs import LogprobColumns, score
from millrace.run.sampling.masks import Masks, Uint32s, check_masks, new_masks
from millrace.run.sampling.pooling import PooledPart, pool_states
from millrace.run.sampling.prompt_scores import PromptLogprobs, score_prompts
from millrace.run.settings import RunnerSettings
from millrace.run.shapes.order import build_order, first_request_parts
from millrace.run.shapes.padded import PaddedShapes


@dataclass(slots=True)  # Never modified, but a frozen dataclass takes several times as long to create.
class Forwarded:
    """What a forward pass leaves for its draw, apart from the hidden states on the device."""

    draws: DrawPlan
    shape: StepShape
    prompt_logprobs: tuple[PromptLogprobs, ...]
    pooled: tuple[PooledPart, ...]


class CudaRunner:
    def __init__(
        self,
        decoder: Decoder,
        device: Device,
        settings: RunnerSettings,
        drafter: DrafterModel | None = None,
        build_pool: KernelBuildPool | None = None,
    ) -> None:
        """`drafter`: for the kinds of `settings.speculate` that are models."""
        self.decoder = decoder
        self._device = device
        state = make_device_state(decoder, device, settings, drafter)
        self.table = state.table
        self._sampler = state.sampler
        self.device_drafts = state.drafts
        self.chain = state.chain
        self._states = state.states
        self._copier = make_copier(state, device, settings)
        self._placing = TokenPlacing(decoder, state.kv, settings.block_size, device)
        self._adapter_slots = state.slots
        self._filler = make_filler(state, device)
        self.contents = BlockContents([state.kv, state.draft_kv], device, settings.kv_dtype)
        shapes = PaddedShapes(shape_facts(decoder, state, settings, drafter))
        self.writer = PacketWriter(shapes.table)
        self.facts = RunnerFacts(
            ring_size=RING,
            min_jump=shapes.facts.sizes.min_jump,
            max_jump_rows=shapes.facts.sizes.max_jump_rows,
            takes_forced=True,
            # A row has one buffer for its adjusted logits.
            verifies_adjusted=False,
            shapes=shapes,
        )
        table = shapes.table
        self.work = StepWork(decoder, state, self.writer, settings, smallest=table.decode(1))
        self.graphs = GraphCache(enabled=shapes.can_capture)
        self.warm_up = WarmUp(
            self.work,
            self.graphs,
            to_build=build_order(table),
            first=first_request_parts(table),
            build_pool=build_pool,
        )
        self._forwarded: Callable[[], Forwarded] | None = None
        """The last forward pass."""
        self._placed: tuple[StepPlan, Pending[Tensor] | None] | None = None
        """Its plan; its tokens and drafts, if masked rows may have drafts."""
        self._draws: DrawPlan | None = None
        """The draw plan of the last step."""
        self._epoch = NO_EPOCH
        """Of the last step's plan."""

    def copy(self, copies: BlockCopies) -> Pending[float]:
        if self._copier is None:
            raise AssertionError("there is no host memory for KV blocks")
        return self._copier.copy(copies)

    @property
    def host_blocks(self) -> tuple[HostBlocks, ...]:
        """Host memory for KV blocks; none without a host tier."""
        return () if self._copier is None else self._copier.host_blocks

    @property
    def slots(self) -> AdapterSlots | None:
        """Those of adapters; None if steps have none."""
        return self._adapter_slots

    def fill_slot(self, slot: int, adapter: Adapter | None) -> IsReady:
        if self._filler is None:
            raise AssertionError("there are no slots for adapters")
        return self._filler.fill(slot, adapter)

    @property
    def shapes(self) -> DeclaredShapes:
        return self.facts.shapes

    @property
    def is_built(self) -> bool:
        return self.warm_up.is_done

    def build_next(self) -> None:
        self.warm_up.build_next()

    def capture(self, plan: CapturePlan) -> bool:
        return self.warm_up.capture(plan.shape)

    def launch(self, plan: StepPlan) -> Pending[StepResult]:
        self.forward(plan)
        return self.draw(plan)

    def forward(self, plan: StepPlan, given: tuple[Int32s, ...] | None = None) -> None:
        self._placed = plan, None
        if not masks_drafts(plan):
            self._forwarded = self._device.queue(lambda: self.run_forward(plan))
            return
        draws = self._device.queue(lambda: self._send(plan))
        self._placed = plan, self._device.launch(lambda: self._place(plan), partial(self._placed_to_host, plan))
        self._forwarded = self._device.queue(lambda: self._body(plan, draws()))

    def drafts(self) -> tuple[Int32s, ...]:
        """Waits for the start of the step's forward pass."""
        assert self._placed is not None, "drafts follow the forward pass of their step"
        plan, placed = self._placed
        return drafts_of(plan, None if placed is None else placed.wait().numpy())

    def mask_memory(self, count: int) -> Uint32s:
        if self._device.kind != "cuda":  # The forward pass may not have begun.
            return new_masks(count, self.decoder.spec.vocab_size)
        return self.work.mask_memory(count)

    def draw(self, plan: StepPlan, inputs: StepInputs | None = None) -> Pending[StepResult]:
        masks = None if inputs is None else inputs.masks
        forwarded = self._forwarded
        assert forwarded is not None, "a draw follows the forward pass of its step"
        if masks is not None and masks.places is not None:
            self.drafts()  # Then the packet has arrived, and may be told which state has which mask.
        return self._device.launch(lambda: self.run_draw(plan, forwarded(), masks), self._copy_to_host)

    def draw_ahead(self, plan: StepPlan, inputs: StepInputs) -> Pending[StepResult] | None:
        assert self._forwarded is not None, "a draw follows the forward pass of its step"
        if not all(head in self.graphs.captured for head in plan.draw.heads):
            return None  # Its capture failed. Uncaptured it might allocate, and wait for the whole device.
        forwarded, masks = self._forwarded(), inputs.masks
        return self._device.launch(lambda: self.run_draw(plan, forwarded, masks, is_ahead=True), self._copy_to_host)

    def masks_ready(self) -> None:
        self.work.masks_ready()

    def _send(self, plan: StepPlan) -> DrawPlan:
        """Send the step's packet and let a drafter that is a model propose."""
        self.table.update_host(plan)
        self._sampler.update(plan)
        if plan.placed:
            self._placing.place(plan.placed)
        if self._states is not None:
            self._states.load(plan.states)
        if self.device_drafts is not None:
            self.device_drafts.admit(plan)
        if self.chain is not None and plan.admitted:
            self.chain.admit(self._device.upload(np.array([one.row for one in plan.admitted], np.int64)))
        repeats, self._epoch = plan.repeats(self._epoch), plan.epoch
        draws, work = self._draw_plan(plan, repeats), self.work
        records = self._sampler.records(plan)
        # A draft model needs this step's blocks before the packet's updates are applied.
        num_sent = self.table.send_excess_blocks(plan, 0 if self.chain is not None else UPDATES_IN_PACKET)
        shape = plan.shape
        work.send(plan, shape, draws, records, num_sent)
        if (proposal := work.proposal(shape)) is not None:
            self.graphs.run(proposal, partial(work.propose_drafts, shape), captures=shape in plan.captures)
        return draws

    def _place(self, plan: StepPlan) -> Tensor:
        """Place drafts before the body does, which finds them placed: the host computes masks meanwhile."""
        self.work.place_drafts(plan.shape)
        return self.work.placed(plan.shape, len(plan.rows))[0]

    def _placed_to_host(self, plan: StepPlan, placed: Tensor) -> Tensor:
        return self.work.placed(plan.shape, len(plan.rows))[1].copy_(placed, non_blocking=True)

    def run_forward(self, plan: StepPlan) -> Forwarded:
        return self._body(plan, self._send(plan))

    def _body(self, plan: StepPlan, draws: DrawPlan) -> Forwarded:
        shape, work = plan.shape, self.work
        if plan.draft_places is not None and not shape.places:
            work.place_drafts(shape)
        if shape.kind == "exact":
            long_rows = _long_rows(plan, work.key_of(shape).long_from)
            hidden = work.body(shape, long_rows=long_rows, drawn_only=False)
        else:
            hidden = self.graphs.run(shape, partial(work.body, shape), captures=shape in plan.captures)
        if self._states is not None:
            self._states.save(plan.states)
        return Forwarded(draws, shape, *self._read_prompts(plan, hidden))

    def _copy_to_host(self, result: StepResult) -> StepResult:
        host = copy_to_host(result, *self.work.drawn_on_host(result.tokens.size(0)))
        if not result.places:
            return host
        counts, into, view = self.work.counts(result.tokens.size(0) // result.places)
        into.copy_(counts, non_blocking=True)
        return _with_counts(host, view)

    def run_draw(
        self, plan: StepPlan, forwarded: Forwarded, masks: Masks | None, *, is_ahead: bool = False
    ) -> StepResult:
        draws, shape, work = forwarded.draws, forwarded.shape, self.work
        check_masks(masks, draws.masked)
        if masks is not None and is_ahead:
            work.send_masks_ahead(len(masks.bits))
        elif masks is not None:
            work.send_masks(masks, draws, shape.tokens_per_row)
        logits: Tensor | None = None
        for head in _heads(plan, draws):
            logits = self.graphs.run(head, partial(work.head, head), captures=head in plan.captures)
        places = shape.tokens_per_row
        drawn, logprobs = work.drawn(len(draws.due) * places), None
        if len(draws.shaped):
            self._draw_shaped(plan, draws, drawn, places)
        if logits is not None and len(draws.scored):
            logprobs = self._score(draws, logits, drawn, places)
        parts = (logprobs, draws.scored, draws.num_logprobs, forwarded.prompt_logprobs)
        result = StepResult(plan.step_no, drawn, *parts, pooled=forwarded.pooled)
        if self.device_drafts is None or not len(draws.due):
            return result
        self.graphs.run(Accept.of(shape), partial(work.accept_drafts, shape), captures=shape in plan.captures)
        if plan.draft_places is None:
            return result
        result = replace(result, places=places)
        # On a CPU the device's memory is the host's, and nothing is copied.
        return result if self._device.kind == "cuda" else _with_counts(result, work.counts(len(draws.due))[0].numpy())

    def _draw_shaped(self, plan: StepPlan, draws: DrawPlan, drawn: Tensor, places: int) -> None:
        """Replace the head's tokens of shaped rows. Those have no drafts, so the plan has their true positions, and
        theirs is the first place."""
        due = draws.due[draws.shaped]
        tokens = self._sampler.draw_shaped(plan.rows[due], (plan.starts + plan.counts)[due])
        drawn[self._device.upload(draws.shaped * places)] = tokens.to(drawn.dtype)

    def _draw_plan(self, plan: StepPlan, repeats: bool) -> DrawPlan:
        last = self._draws
        if repeats and last is not None and last.is_reusable:
            return last
        is_split = plan.draw.full > 0 and plan.draw.greedy > 0
        self._draws = draws = plan_draws(plan, self._sampler.row_params, is_split=is_split)
        self._sampler.keep_raw_logits(plan.rows[draws.due], draws)
        return draws

    def _score(self, draws: DrawPlan, logits: Tensor, drawn: Tensor, places: int) -> LogprobColumns:
        """`logits`: those of the full group, whose states are the last ones of its head. Scored rows have no drafts:
        theirs is the first place."""
        states = len(logits) - (len(draws.full) - np.searchsorted(draws.full, draws.scored)) * places
        index = torch.from_numpy(np.stack([states, draws.scored * places])).to(logits.device, non_blocking=True)
        return score(logits[index[0]], drawn.long()[index[1]], max(1, int(draws.num_logprobs.max())))

    def _read_prompts(
        self, plan: StepPlan, hidden: Tensor
    ) -> tuple[tuple[PromptLogprobs, ...], tuple[PooledPart, ...]]:
        """What rows get for their prompt tokens."""
        if plan.scored is None and plan.pooled is None:
            return (), ()
        query_starts = np.zeros(len(plan.rows) + 1, np.int32)
        np.cumsum(plan.counts, out=query_starts[1:])
        pooled = pool_states(plan, query_starts, self.table, hidden)
        return score_prompts(plan, query_starts, self.table, self.decoder, hidden), pooled


def _heads(plan: StepPlan, draws: DrawPlan) -> tuple[HeadShape, ...]:
    """Those of the plan, which has chosen them for the groups of the draw."""
    heads, places = plan.draw.heads, plan.shape.tokens_per_row
    fits = [head.variant for head in heads] == [variant for variant, _ in draws.groups] and all(
        count * places <= head.states for head, (_, count) in zip(heads, draws.groups, strict=True)
    )
    if not fits:
        raise AssertionError(f"step {plan.step_no} has heads {plan.draw} for groups {draws.groups}")
    return heads


def _with_counts(result: StepResult, counts: Int32s) -> StepResult:
    """`counts`: memory that has NUM_COUNTS numbers of each row when the step has ended."""
    tokens, num_drafts, sources = counts.reshape(-1, NUM_COUNTS).T
    return replace(result, counts=tokens, num_drafts=num_drafts, sources=sources)


def _long_rows(plan: StepPlan, long_from: int) -> tuple[LongRow, ...]:
    if not long_from:
        return ()
    first_tokens = np.cumsum(plan.counts) - plan.counts
    return tuple(
        LongRow(index, int(first_tokens[index]), int(plan.counts[index]), int(plan.starts[index]))
        for index in np.flatnonzero(plan.counts >= long_from).tolist()
    )
