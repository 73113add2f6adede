"""Makes the drafter of a runner from a model."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from millrace.models.decoder import Decoder
from millrace.models.drafters.program import MedusaDrafter
from millrace.run.cpu.draft_pass import NativeDraftPass, NativeEaglePass
from millrace.run.cpu.native_step import NativeStep
from millrace.run.drafting.chain import ChainDrafter, DraftPass
from millrace.run.drafting.drafter import Drafter
from millrace.run.drafting.medusa import MedusaDrafts
from millrace.run.drafting.models import DrafterModel
from millrace.run.drafting.passes import DraftTable, EaglePass, PlainDraftPass
from millrace.run.sampling.sampler import Sampler
from millrace.run.table.request_table import RequestTable


def make_model_drafter(
    model: DrafterModel,
    target: Decoder,
    kv: Sequence[Tensor],
    table: RequestTable,
    sampler: Sampler,
    *,
    block_size: int,
    max_rows: int,
) -> Drafter:
    """`kv`: the drafter's part of the pool."""
    if isinstance(model, MedusaDrafter):
        return MedusaDrafts(model, sampler)
    return ChainDrafter(
        _draft_pass(model, target, kv, table, sampler, block_size, max_rows),
        max_rows=max_rows,
        block_size=block_size,
        vocab_size=target.spec.vocab_size,
        max_context=model.spec.max_context if isinstance(model, Decoder) else target.spec.max_context,
    )


def _draft_pass(
    model: DrafterModel,
    target: Decoder,
    kv: Sequence[Tensor],
    table: RequestTable,
    sampler: Sampler,
    block_size: int,
    max_rows: int,
) -> DraftPass:
    assert not isinstance(model, MedusaDrafter)
    stack = model.native_stack
    if stack is not None and stack.can_run_whole_steps:
        step = NativeStep(stack, kv, table, sampler, max_rows=max_rows)
        if isinstance(model, Decoder):
            return NativeDraftPass(step, model.spec.vocab_size)
        return NativeEaglePass(model, step, target.dtype)
    own_table = DraftTable(table, block_size)
    if isinstance(model, Decoder):
        return PlainDraftPass(model, kv, own_table, sampler)
    return EaglePass(model, kv, own_table, sampler, target.dtype)
