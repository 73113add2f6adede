"""Executes a StepPlan: update the table, gather inputs, run the model, draw tokens, bring them back.

The same code runs on every device. Everything that touches device state happens inside `_execute`, which the device
runs in launch order; the host only waits for results.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from millrace.models.batch import ForwardBatch
from millrace.models.decoder import Decoder
from millrace.plan.step import Int32s, Int64s, StepPlan
from millrace.run.device import Device, Pending
from millrace.run.inputs import gather_inputs
from millrace.run.kv_pool import allocate_kv
from millrace.run.logprobs import PROMPT_SLICE, LogprobColumns, concatenate, score
from millrace.run.request_table import RequestTable
from millrace.run.sampler import Sampler


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Scores of prompt tokens `first` and following of one request, from the chunk of one step."""

    request_id: int
    first: int
    num_top: int
    columns: LogprobColumns


@dataclass(frozen=True, slots=True)
class StepResult:
    step_no: int
    tokens: Tensor
    """int64, what the plan's sampling rows drew, in plan order."""
    logprobs: LogprobColumns | None
    logprob_index: Int64s
    """Which of the drawn tokens have log-probabilities, and with how many likeliest tokens each."""
    logprob_counts: Int32s
    prompt_logprobs: tuple[PromptLogprobs, ...]

    def drawn(self) -> Int32s:
        return self.tokens.numpy().astype(np.int32)


class Runner:
    def __init__(
        self, decoder: Decoder, device: Device, *, num_blocks: int, block_size: int, max_rows: int, max_context: int
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
        )
        max_blocks = min(num_blocks, -(-max_context // block_size))
        self._table = RequestTable(device, max_rows=max_rows, max_blocks=max_blocks)
        self._sampler = Sampler(device, self._table, max_rows=max_rows, vocab_size=decoder.spec.vocab_size)

    def launch(self, plan: StepPlan) -> Pending[StepResult]:
        """Queue the step. Steps run in the order of their launches."""
        return self._device.launch(lambda: self._execute(plan), _to_host)

    def _execute(self, plan: StepPlan) -> StepResult:
        self._table.update(plan)
        self._sampler.update(plan)
        batch = gather_inputs(plan, self._table, self._device, self._block_size)
        hidden = self._decoder.forward(batch, self._kv)
        prompt_logprobs = self._score_prompts(plan, batch, hidden)
        due = np.flatnonzero(plan.samples)
        if len(due) == 0:
            nothing = torch.zeros(0, dtype=torch.int64, device=self._device.torch_device)
            return StepResult(plan.step_no, nothing, None, due, due.astype(np.int32), prompt_logprobs)
        rows = plan.rows[due]
        columns = self._device.upload(np.stack([np.asarray(batch.query_starts_host, np.int32)[due + 1] - 1, rows]))
        last_index, table_rows = columns.long()
        logits = self._decoder.logits(hidden[last_index])
        drawn = self._sampler.draw(logits, rows, (plan.starts + plan.counts)[due])
        self._table.last_tokens[table_rows] = drawn.tokens
        return StepResult(
            plan.step_no, drawn.tokens, drawn.logprobs, drawn.logprob_index, drawn.logprob_counts, prompt_logprobs
        )

    def _score_prompts(self, plan: StepPlan, batch: ForwardBatch, hidden: Tensor) -> tuple[PromptLogprobs, ...]:
        """For rows that ask: position p of the chunk scores prompt token p + 1."""
        scored = []
        for index in np.flatnonzero(self._table.num_prompt_logprobs[plan.rows] >= 0).tolist():
            row = int(plan.rows[index])
            num_top = int(self._table.num_prompt_logprobs[row])
            start = int(plan.starts[index])
            end = min(start + int(plan.counts[index]), int(self._table.num_prompt[row]) - 1)
            if end <= start:
                continue
            first = batch.query_starts_host[index]
            targets = torch.from_numpy(self._table.tokens[row][start + 1 : end + 1].astype(np.int64))
            columns = self._score(hidden[first : first + end - start], targets.to(hidden.device), max(1, num_top))
            scored.append(PromptLogprobs(int(self._table.request_ids[row]), start + 1, num_top, columns))
        return tuple(scored)

    def _score(self, hidden: Tensor, targets: Tensor, num_top: int) -> LogprobColumns:
        parts = [
            score(self._decoder.logits(hidden[at : at + PROMPT_SLICE]), targets[at : at + PROMPT_SLICE], num_top)
            for at in range(0, len(targets), PROMPT_SLICE)
        ]
        return concatenate(parts)


def _to_host(result: StepResult) -> StepResult:
    return replace(
        result,
        tokens=result.tokens.to("cpu", non_blocking=True),
        logprobs=result.logprobs.to_host() if result.logprobs is not None else None,
        prompt_logprobs=tuple(replace(part, columns=part.columns.to_host()) for part in result.prompt_logprobs),
    )
