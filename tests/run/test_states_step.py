"""Recurrent states and latents in the steps of the runners: chunks, prefix hits, of states at checkpoints, preemption
and drafts."""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from helpers.decode_table import want_few_programs
from helpers.quick_interpreter import quick_interpreter
from helpers.small_decoder import with_paged_attention
from helpers.tiny_models import HYBRIDS, VOCAB, StateDictSource, config_of, make_reference
from helpers.triton_mode import device as place
from helpers.triton_mode import interpreted

from millrace.config import RunConfig
from millrace.models.decoder import Decoder
from millrace.models.load import build_decoder
from millrace.models.spec.families import spec_from_config
from millrace.ops.attention import latent
from millrace.params.rows import RowParams
from millrace.params.sampling import SamplingParams
from millrace.plan.drafts import DraftSettings
from millrace.plan.request import Request
from millrace.plan.scheduler import Scheduler, SchedulerSettings
from millrace.plan.shapes.choice import ShapeChoice
from millrace.run.cuda_runner import CudaRunner
from millrace.run.device.device import CpuDevice, open_device
from millrace.run.runner import Runner
from millrace.run.settings import RunnerSettings

SIZES = {"num_blocks": 15, "block_size": 4, "max_rows": 3, "max_context": 96, "state_slots": 3}
BUDGET = 20


def load(case: str, device: torch.device) -> Decoder:
    model = make_reference(case)
    return build_decoder(
        spec_from_config(config_of(model)), StateDictSource.of(model), device=device, dtype=torch.float32
    )


def drive(
    runner: Runner | CudaRunner,
    max_drafts: int = 0,
    predicted: list[list[int]] | None = None,
    has_states: bool = True,
    **changes: Any,
) -> tuple[list[list[int]], Scheduler]:
    """`predicted`: what the requests will probably draw, of which some is right."""
    sizes = SIZES | changes
    scheduler = Scheduler(
        SchedulerSettings(
            num_blocks=sizes["num_blocks"],
            block_size=sizes["block_size"],
            max_running=sizes["max_rows"],
            token_budget=BUDGET,
            state_slots=sizes["state_slots"] if has_states else None,
            prefix_cache=sizes["state_slots"] > 0,
            expected_output=1.0,
            drafts=DraftSettings(max_drafts, max_places=sizes["max_rows"] * (1 + max_drafts), is_padded=max_drafts > 0),
        ),
        shapes=ShapeChoice(runner.shapes),
    )
    draw = random.Random(3)
    shared, phrase = draw.choices(range(VOCAB), k=14), draw.choices(range(VOCAB), k=3)
    for index, length in enumerate((0, 14, 9, 14, 14)):
        prompt = np.array(shared[:length] + phrase * 2 + [index] * (1 + index % 2), np.int32)
        prediction = () if predicted is None else tuple(predicted[index])
        greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, prediction=prediction)
        scheduler.submit(Request(id=index, prompt=prompt, max_tokens=12, row_params=RowParams(greedy, ())))
    tokens: list[list[int]] = [[] for _ in range(5)]
    flying = []
    while scheduler.has_work or flying:
        plan = scheduler.plan(0.0)
        if plan is not None:
            flying.append((plan, runner.launch(plan)))
        if len(flying) > 1 or plan is None:
            plan, pending = flying.pop(0)
            result = pending.wait()
            outcome = scheduler.apply(plan.step_no, result.drawn(), result.counts)
            for request_id, token in zip(outcome.request_ids.tolist(), outcome.tokens.tolist(), strict=True):
                tokens[request_id].append(token)
        scheduler.check_sums()
    return tokens, scheduler


def plain_tokens(case: str) -> list[list[int]]:
    sizes = SIZES | {"state_slots": 0, "num_blocks": 200}
    return drive(Runner(load(case, torch.device("cpu")), CpuDevice(1), RunnerSettings(**sizes)), **sizes)[0]


def nearly(answers: list[list[int]]) -> list[list[int]]:
    """Every fifth token is another one."""
    return [[(token + (at % 5 == 4)) % VOCAB for at, token in enumerate(answer)] for answer in answers]


@pytest.mark.parametrize("case", ["qwen3_next_dense", "granite_hybrid"])
@pytest.mark.parametrize("max_drafts", [0, 3])
def test_the_plain_runner(case: str, max_drafts: int) -> None:
    drafting = {"speculate": "ngram", "state_places": 1 + max_drafts} if max_drafts else {}
    runner = Runner(load(case, torch.device("cpu")), CpuDevice(1), RunnerSettings(**SIZES, **drafting))
    expected = plain_tokens(case)
    found, scheduler = drive(runner, max_drafts, nearly(expected))
    assert found == expected
    assert scheduler.prefix.checkpoints.num_hits > 0
    assert scheduler.num_preemptions > 0
    assert not max_drafts or runner.drafted.num_accepted > 0


@pytest.mark.parametrize(("case", "max_drafts"), [("qwen3_next_dense", 3), ("granite_hybrid", 0), ("deepseek_v3", 0)])
def test_the_gpu_runner(case: str, max_drafts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if interpreted:
        want_few_programs(monkeypatch)
        monkeypatch.setattr(latent, "num_multiprocessors", lambda _: 1)
    drafting = {"speculate": "ngram", "state_places": 1 + max_drafts} if max_drafts else {}
    device = open_device(RunConfig(device="cuda")) if place.type == "cuda" else CpuDevice(1)
    settings = RunnerSettings(token_budget=BUDGET, **SIZES, **drafting)
    runner = CudaRunner(with_paged_attention(load(case, place)), device, settings)
    expected = plain_tokens(case)
    with quick_interpreter() if interpreted else nullcontext():
        found, scheduler = drive(runner, max_drafts, nearly(expected), has_states=case in HYBRIDS)
    assert found == expected
    assert case not in HYBRIDS or scheduler.prefix.checkpoints.num_hits > 0
