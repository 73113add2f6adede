"""The plain runner: update the table, gather inputs, run the model, draw tokens, copy them to the host.

It runs on any device, normally a CPU. Everything that touches device state happens inside `_execute`, or `_forward` and
`_draw`, which the device runs in launch order; the host only waits for results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from millrace.models.adapters.read import Adapter
from millrace.models.adapters.slots import AdapterSlots
from millrace.models.batch import Taps
from millrace.models.decoder import Decoder
from millrace.plan.shapes.declared import DeclaredShapes, OwnSizes
from millrace.plan.step import (
    BlockCopies,
    Bools,
    CapturePlan,
    Int32s,
    StepInputs,
    StepPlan,
)
from millrace.run.cpu.model_drafter import make_model_drafter
from millrace.run.cpu.native_step import NativeStep
from millrace.run.device.adapter_slots import IsReady, OrderedFiller, make_slots
from millrace.run.device.block_contents import BlockContents
from millrace.run.device.block_copier import JointCopier, OrderedCopier
from millrace.run.device.device import Device, Pending
from millrace.run.device.host_blocks import HostBlocks
from millrace.run.device.state_pool import make_state_pool
from millrace.run.device.token_placing import TokenPlacing
from millrace.run.drafting.drafted_rows import DraftedRows, VerifiedStep
from millrace.run.drafting.drafter import Drafter, DraftGuide
from millrace.run.drafting.drafters import make_drafters
from millrace.run.drafting.models import DrafterModel, allocate_pools, kind_of, read_layers
from millrace.run.facts import RunnerFacts
from millrace.run.protocol import StepResult, TellDrafts, copy_to_host
from millrace.run.sampling.masks import Masks, Uint32s, new_masks
from millrace.run.sampling.penalties import NO_DRAFT
from millrace.run.sampling.pooling import PooledPart, pool_states
from millrace.run.sampling.prompt_scores import PromptLogprobs, score_prompts
from millrace.run.sampling.sampler import Drawn, Sampler
from millrace.run.settings import RunnerSettings
from millrace.run.table.batch import StepRows
from millrace.run.table.inputs import gather_inputs, last_tokens
from millrace.run.table.request_table import RequestTable

SLOW_STEP_S = 0.05
"""The host's work between steps this long is a few thousandths of the time, and with one step in flight a request that
arrives during a step takes part in the next one, not in the one after it."""
_NO_INDEX, _NO_COUNTS = np.zeros(0, np.int64), np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class DrawStates:
    """The result of a forward pass: the hidden states to draw from, in plan order."""

    hidden: Tensor
    """[n, hidden]"""
    rows: Int32s
    """Table row of each state."""
    positions: Int32s
    """Positions of the tokens to draw."""
    prompt_logprobs: tuple[PromptLogprobs, ...]
    verified: VerifiedStep | None
    """What is computed for the plan, if rows may have drafts."""
    pooled: tuple[PooledPart, ...] = ()


@dataclass(frozen=True, slots=True)
class Computed:
    """What the target's forward pass gives."""

    hidden: Tensor
    """The states of the tokens that draw."""
    for_drafter: Tensor | None
    """What a feature drafter reads of all tokens."""
    prompt_logprobs: tuple[PromptLogprobs, ...]
    pooled: tuple[PooledPart, ...]


class Runner:
    """Runs every step at its own size; needs no warm-up."""

    facts = RunnerFacts(slow_step_s=SLOW_STEP_S)
    shapes: DeclaredShapes = facts.shapes
    is_built = True

    def __init__(
        self,
        decoder: Decoder,
        device: Device,
        settings: RunnerSettings,
        drafter: DrafterModel | None = None,
        guide: DraftGuide | None = None,
        tell_drafts: TellDrafts | None = None,
    ) -> None:
        """`drafter`: for the kinds of `settings.speculate` that are models. `guide`: the grammars, on rank 0.
        `tell_drafts`: on rank 0 of several, called on the device's thread for every step with draft places."""
        self.decoder = decoder
        self._device = device
        self._block_size = settings.block_size
        self._mesh = decoder.mesh
        self._tell_drafts = tell_drafts
        self.kv, self._draft_kv = allocate_pools(decoder, device.torch_device, settings, drafter)
        self._state_pool = make_state_pool(decoder, device, settings)
        pools, slots = [kv for kv in (self.kv, self._draft_kv) if kv], settings.host_slots
        self._copier = JointCopier([OrderedCopier(kv, slots, device) for kv in pools]) if slots else None
        self._placing = TokenPlacing(decoder, self.kv, settings.block_size, device)
        self.contents = BlockContents(pools, device, settings.kv_dtype)
        spec, max_rows = decoder.spec, settings.max_rows
        num_groups = spec.kv_groups.num_groups
        self.table = RequestTable(device, max_rows=max_rows, max_blocks=settings.context_blocks, num_groups=num_groups)
        self.sampler = Sampler(device, self.table, max_rows=max_rows, vocab_size=spec.vocab_size)

        self._slots = make_slots(decoder, settings)
        self.native_step: NativeStep | None = None
        """The C++ step, if the model has one."""
        stack = decoder.native_stack
        if stack is not None and stack.can_run_whole_steps:
            self.native_step = NativeStep(
                stack, self.kv, self.table, self.sampler, max_rows=max_rows, slots=self._slots
            )
        model: Drafter | None = None
        if drafter is not None:
            model = make_model_drafter(
                drafter,
                decoder,
                self._draft_kv,
                self.table,
                self.sampler,
                block_size=settings.block_size,
                max_rows=max_rows,
            )
        self._read_layers = read_layers(drafter)
        self._all_states = settings.all_states
        drafters = make_drafters(settings.speculate, model, "" if drafter is None else kind_of(drafter))
        self.drafted = DraftedRows(self.table, max_rows, drafters, guide) if drafters is not None else None
        self._no_states = torch.zeros((0, decoder.spec.hidden_size), dtype=decoder.dtype, device=device.torch_device)
        self._expanded: Callable[[], VerifiedStep | None] | None = None
        """What the last forward pass of a step with masks computes."""
        self._forwarded: Callable[[], DrawStates] | None = None
        """The last forward pass."""
        self._whole: Pending[StepResult] | None = None

    def forward(self, plan: StepPlan, given: tuple[Int32s, ...] | None = None) -> None:
        if plan.masked is None:  # the draw waits for nothing: both parts are one launch, and natively one call
            self._whole = self._launch(lambda: self.execute(plan, given))
        else:
            self._expanded = expanded = self._device.queue(lambda: self._expand(plan, given))
            self._forwarded = self._device.queue(lambda: self._mesh.step(lambda: self._states(plan, expanded())))

    def drafts(self) -> tuple[Int32s, ...]:
        verified = self._expanded() if self._expanded is not None else None
        assert verified is not None, "no row has places for drafts"
        return verified.drafts

    def mask_memory(self, count: int) -> Uint32s:
        return new_masks(count, self.decoder.spec.vocab_size)

    def draw(self, plan: StepPlan, inputs: StepInputs | None = None) -> Pending[StepResult]:
        masks = None if inputs is None else inputs.masks
        whole, forwarded = self._whole, self._forwarded
        self._whole = self._forwarded = None
        if whole is not None and masks is None:
            return whole
        if forwarded is None:
            raise AssertionError("a draw follows the forward pass of its step, and only masked rows have masks")
        return self._launch(lambda: self._draw(plan, forwarded(), masks))

    def draw_ahead(self, plan: StepPlan, inputs: StepInputs) -> Pending[StepResult] | None:
        return None

    def masks_ready(self) -> None:
        pass

    def launch(self, plan: StepPlan) -> Pending[StepResult]:
        """Queue both parts of a step."""
        self.forward(plan)
        return self.draw(plan)

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
        return self._slots

    def fill_slot(self, slot: int, adapter: Adapter | None) -> IsReady:
        """Begin to fill a slot that no later step reads until this is ready; None empties it. Steps launched so far
        read what it held."""
        if self._slots is None:
            raise AssertionError("there are no slots for adapters")
        return OrderedFiller(self._slots, self._device).fill(slot, adapter)

    def build_next(self) -> None:
        pass

    def capture(self, plan: CapturePlan) -> bool:
        return False

    def _launch(self, work: Callable[[], StepResult]) -> Pending[StepResult]:
        return self._device.launch(lambda: self._mesh.step(work), copy_to_host)

    def execute(self, plan: StepPlan, given: tuple[Int32s, ...] | None) -> StepResult:
        self._begin(plan)
        drafted = self.drafted
        if drafted is None:
            if self._is_one_call(plan):
                return StepResult(plan.step_no, self._whole_step(plan), None, _NO_INDEX, _NO_COUNTS, ())
            return self._draw(plan, self._states(plan, None), None)
        is_one_call = self._is_one_call(plan) and not drafted.needs_hidden(plan)
        if plan.draft_places is None and is_one_call:
            return StepResult(plan.step_no, self._plain_step(plan, drafted), None, _NO_INDEX, _NO_COUNTS, ())
        verified = self._verified(drafted, plan, given)
        if verified.is_as_planned and is_one_call:
            return self._without_drafts(plan, self._plain_step(plan, drafted), drafted)
        if not verified.has_drafts and is_one_call and len(verified.batch.rows):
            drawn = Drawn(self._whole_step(verified.batch), None, _NO_INDEX, _NO_COUNTS)
            drafted.feed(verified.batch, verified.draws)
            return self._accept(plan, verified, drawn, ())
        return self._draw(plan, self._states(plan, verified), None)

    def _plain_step(self, plan: StepPlan, drafted: DraftedRows) -> Tensor:
        tokens = self._whole_step(plan)
        drafted.feed(plan, plan.samples)
        drafted.append(plan, tokens.numpy())
        return tokens

    def _without_drafts(self, plan: StepPlan, tokens: Tensor, drafted: DraftedRows) -> StepResult:
        """The result of a step with places for which no drafts were found."""
        none = np.zeros(len(tokens), np.int32)
        return StepResult(
            plan.step_no,
            tokens,
            None,
            _NO_INDEX,
            _NO_COUNTS,
            (),
            counts=none + np.int32(1),
            num_drafts=none,
            trained=drafted.trained_of(plan, none),
        )

    def _is_one_call(self, plan: StepPlan) -> bool:
        return self.native_step is not None and len(plan.rows) > 0 and self.native_step.can_run(plan)

    def _slots_of(self, plan: StepPlan) -> AdapterSlots | None:
        """The slots if some row of the step has an adapter."""
        return self._slots if plan.shape.key == OwnSizes.WITH_ADAPTERS else None

    def _whole_step(self, batch: StepRows) -> Tensor:
        assert self.native_step is not None
        return self.native_step(batch)

    def _expand(self, plan: StepPlan, given: tuple[Int32s, ...] | None) -> VerifiedStep | None:
        self._begin(plan)
        return None if self.drafted is None else self._verified(self.drafted, plan, given)

    def _begin(self, plan: StepPlan) -> None:
        """Take over what changes with the plan."""
        drafted = self.drafted
        try:
            if drafted is not None:
                drafted.leave(plan)
            self.table.update(plan)
            self.sampler.update(plan)
            if plan.placed:
                self._placing.place(plan.placed)
            if self._state_pool is not None:
                self._state_pool.load(plan.states)
            if drafted is not None:
                drafted.admit(plan)
        except Exception:
            self._tell(plan, ())
            raise

    def _verified(self, drafted: DraftedRows, plan: StepPlan, given: tuple[Int32s, ...] | None) -> VerifiedStep:
        try:
            verified = drafted.expand(plan, given)
        except Exception:
            self._tell(plan, ())
            raise
        self._tell(plan, verified.drafts)
        return verified

    def _tell(self, plan: StepPlan, drafts: tuple[Int32s, ...]) -> None:
        """Other ranks wait for the drafts of every step that has places for some, also if it fails here."""
        if self._tell_drafts is not None and plan.draft_places is not None:
            self._tell_drafts(StepInputs(plan.step_no, drafts=drafts))

    def _states(self, plan: StepPlan, verified: VerifiedStep | None) -> DrawStates:
        batch: StepRows = plan if verified is None else verified.batch
        draws = plan.samples.astype(np.int32) if verified is None else verified.draws
        rows = np.repeat(batch.rows, draws)
        positions = np.repeat(batch.starts + batch.counts - draws, draws) + places_of(draws) + 1
        if not len(batch.rows):
            return DrawStates(self._no_states, rows, positions, (), verified)
        computed = self._compute(batch, draws, self._slots_of(plan))
        if self._state_pool is not None:
            self._state_pool.save(plan.states)
        if self.drafted is not None:
            self.drafted.feed(batch, draws, computed.for_drafter)
        return DrawStates(computed.hidden, rows, positions, computed.prompt_logprobs, verified, computed.pooled)

    def _compute(self, step: StepRows, draws: Int32s, slots: AdapterSlots | None) -> Computed:
        scores_prompts = step.scored is not None
        taps, drafter_needs_all = self._taps(step)
        needs_all = drafter_needs_all or step.pooled is not None or self._all_states
        query_starts = np.zeros(len(step.rows) + 1, np.int32)
        np.cumsum(step.counts, out=query_starts[1:])
        prompt_logprobs: tuple[PromptLogprobs, ...] = ()
        if self.native_step is not None and not scores_prompts:
            hidden = self.native_step.forward(step, step.counts if needs_all else draws, taps)
        else:
            batch = gather_inputs(step, self.table, self._device, self._block_size, slots)
            batch.taps = taps
            if self._state_pool is not None:
                batch.states = self._state_pool.of_step(batch.rows.query_starts, step.starts, step.rows)
            if draws.sum() < step.num_tokens and not needs_all and not scores_prompts and int(draws.max()) <= 1:
                batch.last = last_tokens(batch, step.samples.nonzero()[0], self._device)
            hidden = self.decoder.forward(batch, self.kv)
            prompt_logprobs = score_prompts(step, query_starts, self.table, self.decoder, hidden)
        pooled = pool_states(step, query_starts, self.table, hidden)
        all_states = hidden if drafter_needs_all else None if taps is None else taps.out.flatten(1)
        due = np.repeat(query_starts[1:] - draws, draws) + places_of(draws)
        states = hidden if len(due) == len(hidden) else hidden[self._device.upload(due).long()]
        return Computed(states, all_states, prompt_logprobs, pooled)

    def _taps(self, step: StepRows) -> tuple[Taps | None, bool]:
        """What a feature drafter reads: states inside the target, or those of all tokens after its final norm."""
        layers, decoder = self._read_layers, self.decoder
        if self.drafted is None or not self.drafted.needs_hidden(step):
            return None, False
        if layers is None or not len(layers):
            return None, layers is not None
        shape = (step.num_tokens, len(layers), decoder.spec.hidden_size)
        return Taps(layers, torch.empty(shape, dtype=decoder.dtype, device=decoder.device)), False

    def _draw(self, plan: StepPlan, states: DrawStates, masks: Masks | None) -> StepResult:
        verified = states.verified
        if masks is not None and verified is not None:
            masks = verified.state_masks(masks)
        drawn = self._draw_tokens(states, masks, self._drafts_before(states))
        if verified is not None and self.drafted is not None:
            self.drafted.take_hidden(states.hidden, states.rows, states.positions)
            return replace(self._accept(plan, verified, drawn, states.prompt_logprobs), pooled=states.pooled)
        if len(states.rows):
            self.table.last_tokens[self._device.upload(states.rows).long()] = drawn.tokens
        parts = (drawn.logprobs, drawn.logprob_index, drawn.logprob_counts, states.prompt_logprobs)
        return StepResult(plan.step_no, drawn.tokens, *parts, pooled=states.pooled)

    def _accept(
        self, plan: StepPlan, verified: VerifiedStep, drawn: Drawn, prompt_logprobs: tuple[PromptLogprobs, ...]
    ) -> StepResult:
        """Keep the tokens up to the first wrong draft of each row."""
        assert self.drafted is not None
        scored = drawn.logprob_index
        accepted = self.drafted.accept(plan, verified, drawn.tokens.numpy().astype(np.int32))
        tokens = torch.from_numpy(accepted.tokens)
        self.sampler.count(np.repeat(plan.rows[plan.samples], accepted.counts), tokens)
        has_places = plan.draft_places is not None
        return StepResult(
            plan.step_no,
            tokens,
            drawn.logprobs,
            verified.drawing_rows()[scored],
            drawn.logprob_counts,
            prompt_logprobs,
            verified.places()[scored],
            counts=accepted.counts if has_places else None,
            num_drafts=accepted.num_drafts if has_places else None,
            sources=accepted.sources if has_places else None,
            proposed=verified.drafts if verified.has_drafts else (),
            trained=accepted.trained,
        )

    def _drafts_before(self, states: DrawStates) -> Int32s | None:
        """The draft before each state, for penalties. None if rows have no drafts."""
        if states.verified is None or self.drafted is None:
            return None
        if not self.sampler.row_params.has_penalties[states.rows].any():
            return np.full(len(states.rows), NO_DRAFT, np.int32)
        return self.drafted.before(states.verified)

    def _draw_tokens(self, states: DrawStates, masks: Masks | None, drafts: Int32s | None) -> Drawn:
        rows, positions = states.rows, states.positions
        if not len(rows):
            return Drawn(torch.zeros(0, dtype=torch.int64, device=states.hidden.device), None, _NO_INDEX, _NO_COUNTS)
        is_adjusted = self.sampler.row_params.is_adjusted[rows]
        if self.native_step is not None and not is_adjusted.any():
            return Drawn(
                self.native_step.draw(states.hidden, rows, positions, masks=masks), None, _NO_INDEX, _NO_COUNTS
            )
        if self.native_step is not None and not is_adjusted.all():
            return self._draw_groups(self.native_step, states, is_adjusted, masks, drafts)
        logits = self.decoder.logits(states.hidden, draws=True)
        return self.sampler.draw(logits, rows, positions, masks, drafts)

    def _draw_groups(
        self, native: NativeStep, states: DrawStates, is_adjusted: Bools, masks: Masks | None, drafts: Int32s | None
    ) -> Drawn:
        """Rows that need more than a draw go through the sampler; the others keep the native head."""
        tokens = torch.empty(len(states.rows), dtype=torch.int64)
        plain, adjusted = np.flatnonzero(~is_adjusted), np.flatnonzero(is_adjusted)
        plain_index, adjusted_index = torch.from_numpy(plain), torch.from_numpy(adjusted)
        tokens[plain_index] = native.draw(
            states.hidden[plain_index],
            states.rows[plain],
            states.positions[plain],
            masks=None if masks is None else masks.of(plain),
        )
        logits = self.decoder.logits(states.hidden[adjusted_index], draws=True)
        own_masks = None if masks is None else masks.of(adjusted)
        own_drafts = None if drafts is None else drafts[adjusted]
        drawn = self.sampler.draw(logits, states.rows[adjusted], states.positions[adjusted], own_masks, own_drafts)
        tokens[adjusted_index] = drawn.tokens
        return Drawn(tokens, drawn.logprobs, adjusted[drawn.logprob_index], drawn.logprob_counts)


def places_of(counts: Int32s) -> Int32s:
    """0, 1, 2 ... for each of the counts."""
    total = int(counts.sum())
    return np.arange(total, dtype=np.int32) - np.repeat(np.cumsum(counts) - counts, counts).astype(np.int32)
