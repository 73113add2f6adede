"""Nobody modifies a plan: after its step it holds what it held when it was made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.plan_contents import contents
from helpers.small_decoder import decoder_for

from millrace.params.rows import RowParams
from millrace.params.sampling import SamplingParams
from millrace.plan.drafts import DraftSettings
from millrace.plan.request import Request
from millrace.plan.scheduler import Scheduler, SchedulerSettings
from millrace.plan.step import StepInputs, StepPlan
from millrace.run.device.device import CpuDevice, Pending
from millrace.run.protocol import StepResult
from millrace.run.runner import Runner
from millrace.run.sampling.masks import MaskedRows
from millrace.run.settings import RunnerSettings

BLOCK, ROWS, BLOCKS, CONTEXT = 4, 6, 32, 96
ALL_TOKENS = 0xFFFFFFFF
PARAMS = (
    SamplingParams(temperature=0, max_tokens=24),
    SamplingParams(temperature=0, max_tokens=40, prompt_logprobs=2),
    SamplingParams(temperature=0, max_tokens=32, logprobs=1),
    SamplingParams(temperature=0.3, seed=3, max_tokens=30, repetition_penalty=1.1),
    SamplingParams(temperature=0, max_tokens=0, pooling="mean"),
    SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=0),
)


def requests() -> list[Request]:
    """Prompts that repeat themselves, so that drafts are found. Some rows have masks."""
    made = []
    for index in range(12):
        params = PARAMS[index % len(PARAMS)]
        prompt = np.tile(np.arange(3 + index % 4, dtype=np.int32), 6)[: 12 + index]
        made.append(
            Request(
                id=index,
                prompt=prompt,
                max_tokens=params.max_tokens or 0,
                row_params=RowParams(params),
                read_cache=params.prompt_logprobs is None and not params.pooling,
                constrained=index % 3 == 0 and not params.pooling,
            )
        )
    return made


def launch(runner: Runner, plan: StepPlan) -> Pending[StepResult]:
    runner.forward(plan)
    if plan.masked is None:
        return runner.draw(plan)
    index = np.flatnonzero(plan.masked[plan.samples])
    drafts: list[list[int]] = [[] for _ in index]
    if plan.draft_places is not None and plan.draft_places[plan.masked].any():
        drafts = [runner.drafts()[at].tolist() for at in index.tolist()]
    rows = MaskedRows(index, index, drafts)
    bits = runner.mask_memory(rows.num_masks)
    bits[:] = ALL_TOKENS
    return runner.draw(plan, StepInputs(plan.step_no, rows.masks(bits)))


@pytest.mark.parametrize("speculate", ["off", "ngram"])
def test_a_plan_is_the_same_after_its_step(speculate: Any) -> None:
    sizes: dict[str, int] = {"num_blocks": BLOCKS, "block_size": BLOCK}
    device = CpuDevice(1)
    settings = RunnerSettings(**sizes, max_rows=ROWS, max_context=CONTEXT, speculate=speculate)
    runner = Runner(decoder_for(torch.device("cpu"), paged=False), device, settings)
    drafts = DraftSettings(3, max_places=ROWS * 4) if speculate != "off" else DraftSettings()
    scheduler = Scheduler(
        SchedulerSettings(**sizes, max_running=ROWS, token_budget=32, expected_output=1.0, drafts=drafts)
    )
    for request in requests():
        scheduler.submit(request)
    flying: list[tuple[StepPlan, Any, Pending[StepResult]]] = []
    num_ended = num_masked = num_accepted = 0
    while scheduler.has_work or flying:
        plan = scheduler.plan(0.0)
        if plan is not None:
            num_masked += plan.masked is not None
            flying.append((plan, contents(plan), launch(runner, plan)))
        if len(flying) > 1 or plan is None:
            done, before, pending = flying.pop(0)
            result = pending.wait()
            assert contents(done) == before
            num_accepted += 0 if result.counts is None else int(np.maximum(result.counts - 1, 0).sum())
            num_ended += len(scheduler.apply(done.step_no, result.drawn(), result.counts).ended)
    device.close()
    assert num_ended == 12
    assert num_masked
    assert scheduler.num_preemptions
    assert bool(num_accepted) == (speculate != "off")
