"""The plain runner: update the table, gather inputs, run the model, draw tokens, copy them to the host.

It runs on any device, normally a CPU. Everything that touches device state happens inside `_execute`, which the device
runs in launch order; the host only waits for results.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from millrace.models.decoder import Decoder
from millrace.plan.step import Int32s, Int64s, StepPlan
from millrace.run.cpu.native_step import NativeStep
from millrace.run.device.device import Device, Pending
from millrace.run.device.kv_pool import KvFormat, allocate_kv
from millrace.run.sampling.logprobs import LogprobColumns
from millrace.run.sampling.prompt_scores import PromptLogprobs, score_prompts
from millrace.run.sampling.sampler import Sampler
from millrace.run.table.inputs import gather_inputs, last_tokens
from millrace.run.table.request_table import RequestTable

_NO_INDEX, _NO_COUNTS = np.zeros(0, np.int64), np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class StepResult:
    step_no: int
    tokens: Tensor
    """Tokens drawn by the rows that draw, in plan order."""
    logprobs: LogprobColumns | None
    logprob_index: Int64s
    """Indices of the drawn tokens with log-probabilities; `logprob_counts` has the number of top tokens for each."""
    logprob_counts: Int32s
    prompt_logprobs: tuple[PromptLogprobs, ...]
    view: Int32s | None = None
    """The host memory of `tokens` as an array, if it exists already."""

    def drawn(self) -> Int32s:
        return (self.tokens.numpy() if self.view is None else self.view).astype(np.int32)


class AnyRunner(Protocol):
    """What the engine needs from a runner."""

    def launch(self, plan: StepPlan) -> Pending[StepResult]:
        """Queue the step. Steps run in the order of their launches."""

    @property
    def is_warm(self) -> bool:
        """True once warm-up is complete."""

    @property
    def num_cold(self) -> int:
        """Number of buckets still to warm up."""

    def warm_next(self) -> None:
        """Warm up one bucket: some tens of milliseconds. Call it when idle."""


class Runner:
    """Runs every step at its own size; needs no warm-up."""

    is_warm = True
    num_cold = 0

    def __init__(
        self,
        decoder: Decoder,
        device: Device,
        *,
        num_blocks: int,
        block_size: int,
        max_rows: int,
        max_context: int,
        kv_dtype: KvFormat = "full",
    ) -> None:
        self._decoder = decoder
        self._device = device
        self._block_size = block_size
        self._kv = allocate_kv(
            decoder.spec,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=decoder.dtype,
            device=device.torch_device,
            kv_dtype=kv_dtype,
        )
        max_blocks = min(num_blocks, -(-max_context // block_size))
        self._table = RequestTable(device, max_rows=max_rows, max_blocks=max_blocks)
        self._sampler = Sampler(device, self._table, max_rows=max_rows, vocab_size=decoder.spec.vocab_size)

        self.native_step = None
        if decoder.native_stack is not None and decoder.native_stack.can_run_whole_steps:
            self.native_step = NativeStep(decoder.native_stack, self._kv, self._table, self._sampler, max_rows=max_rows)

    def launch(self, plan: StepPlan) -> Pending[StepResult]:
        """Queue the step. Steps run in the order of their launches."""
        return self._device.launch(lambda: self._execute(plan), copy_to_host)

    def warm_next(self) -> None:
        pass

    def _execute(self, plan: StepPlan) -> StepResult:
        self._table.update(plan)
        self._sampler.update(plan)
        if self.native_step is not None and self.native_step.can_run(plan):
            tokens = self.native_step(plan)
            return StepResult(plan.step_no, tokens, None, _NO_INDEX, _NO_COUNTS, ())
        batch = gather_inputs(plan, self._table, self._device, self._block_size)
        due = np.flatnonzero(plan.samples)
        if len(due) < plan.num_tokens and not (self._table.num_prompt_logprobs[plan.rows] >= 0).any():
            batch.last = last_tokens(batch, due, self._device)
        hidden = self._decoder.forward(batch, self._kv)
        query_starts = np.asarray(batch.query_starts_host, np.int32)
        prompt_logprobs = score_prompts(plan, query_starts, self._table, self._decoder, hidden)
        if len(due) == 0:
            no_tokens = torch.zeros(0, dtype=torch.int64, device=self._device.torch_device)
            return StepResult(plan.step_no, no_tokens, None, due, due.astype(np.int32), prompt_logprobs)
        rows, positions = plan.rows[due], (plan.starts + plan.counts)[due]
        columns = self._device.upload(np.stack([query_starts[due + 1] - 1, rows]))
        last_index, table_rows = columns.long()
        last_hidden = hidden if len(due) == len(hidden) else hidden[last_index]
        logits = self._decoder.logits(last_hidden, draws=True)
        drawn = self._sampler.draw(logits, rows, positions)
        self._table.last_tokens[table_rows] = drawn.tokens
        return StepResult(
            plan.step_no, drawn.tokens, drawn.logprobs, drawn.logprob_index, drawn.logprob_counts, prompt_logprobs
        )


def copy_to_host(result: StepResult, into: Tensor | None = None, view: Int32s | None = None) -> StepResult:
    """Start copying the result's tensors to the host. Tokens go to `into`, if given, whose memory is `view`."""
    drawn = result.tokens
    return StepResult(
        step_no=result.step_no,
        tokens=drawn.to("cpu", non_blocking=True) if into is None else into.copy_(drawn, non_blocking=True),
        logprobs=result.logprobs.to_host() if result.logprobs is not None else None,
        logprob_index=result.logprob_index,
        logprob_counts=result.logprob_counts,
        prompt_logprobs=tuple(replace(part, columns=part.columns.to_host()) for part in result.prompt_logprobs),
        view=view,
    )
