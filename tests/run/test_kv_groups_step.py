"""A model with windows in several KV groups gives the same tokens as in one group, on both runners."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.decode_table import want_few_programs
from helpers.quick_interpreter import quick_interpreter
from helpers.small_decoder import with_paged_attention
from helpers.tiny_models import VOCAB, StateDictSource, config_of, make_reference
from helpers.triton_mode import device as place
from helpers.triton_mode import interpreted

from millrace.config import RunConfig
from millrace.models.decoder import Decoder
from millrace.models.load import build_decoder
from millrace.models.spec.families import spec_from_config
from millrace.params.rows import RowParams
from millrace.params.sampling import SamplingParams
from millrace.plan.kv.groups import KvGroups
from millrace.plan.request import Request
from millrace.plan.scheduler import Scheduler, SchedulerSettings
from millrace.plan.shapes.choice import ShapeChoice
from millrace.run.cuda_runner import CudaRunner
from millrace.run.device.device import CpuDevice, open_device
from millrace.run.runner import Runner
from millrace.run.settings import RunnerSettings

SIZES = {"block_size": 4, "max_rows": 4, "max_context": 128}
CASE = "qwen2_window"
BUDGET, BLOCKS = 40, 150


def load(device: torch.device, grouped: bool) -> Decoder:
    model = make_reference(CASE)
    spec = replace(spec_from_config(config_of(model)), has_kv_groups=grouped)
    return build_decoder(spec, StateDictSource.of(model), device=device, dtype=torch.float32)


def drive(runner: Runner | CudaRunner, windows: tuple[int | None, ...], num_blocks: int) -> dict[int, list[int]]:
    scheduler = Scheduler(
        SchedulerSettings(
            num_blocks=num_blocks,
            block_size=4,
            max_running=4,
            token_budget=BUDGET,
            mixed_budget=24,
            groups=KvGroups(windows),
        ),
        shapes=ShapeChoice(runner.shapes),
    )
    draw, greedy = random.Random(3), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for index, length in enumerate((1, 50, 7, 30, 12)):
        prompt = np.array(draw.choices(range(VOCAB), k=length), np.int32)
        scheduler.submit(Request(id=index, prompt=prompt, max_tokens=8, row_params=RowParams(greedy, ())))
    tokens: dict[int, list[int]] = {index: [] for index in range(5)}
    flying = []
    while scheduler.has_work or flying:
        plan = scheduler.plan(0.0)
        if plan is not None:
            flying.append((plan, runner.launch(plan)))
        if len(flying) > 1 or plan is None:
            plan, pending = flying.pop(0)
            outcome = scheduler.apply(plan.step_no, pending.wait().drawn())
            for request_id, token in zip(outcome.request_ids.tolist(), outcome.tokens.tolist(), strict=True):
                tokens[request_id].append(token)
    assert all(len(own) == 8 for own in tokens.values())
    return tokens


def one_group() -> dict[int, list[int]]:
    return drive(
        Runner(load(torch.device("cpu"), False), CpuDevice(1), RunnerSettings(num_blocks=BLOCKS, **SIZES)),
        (None,),
        BLOCKS,
    )


def test_the_plain_runner() -> None:
    decoder = load(torch.device("cpu"), True)
    windows = decoder.spec.kv_groups.windows
    assert windows == (None, 4, 4)
    runner = Runner(decoder, CpuDevice(1), RunnerSettings(num_blocks=BLOCKS, **SIZES))
    assert drive(runner, windows, BLOCKS) == one_group()


def test_the_gpu_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    if interpreted:
        want_few_programs(monkeypatch)
    decoder = with_paged_attention(load(place, True))
    device = open_device(RunConfig(device="cuda")) if place.type == "cuda" else CpuDevice(1)
    runner = CudaRunner(decoder, device, RunnerSettings(num_blocks=BLOCKS, token_budget=BUDGET, **SIZES))
    with quick_interpreter() if interpreted else nullcontext():
        assert drive(runner, decoder.spec.kv_groups.windows, BLOCKS) == one_group()
