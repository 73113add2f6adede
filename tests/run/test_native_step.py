"""Whole steps in one native call draw the same tokens as the plain runner."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.adapter_files import ATTENTION, MLP, write_adapter
from helpers.tiny_models import VOCAB, StateDictSource, config_of, make_reference

from millrace.config import RunConfig
from millrace.models.adapters.read import read_adapter
from millrace.models.load import build_decoder
from millrace.models.spec.families import spec_from_config
from millrace.ops.cpp import native
from millrace.params.rows import RowParams
from millrace.params.sampling import SamplingParams
from millrace.plan.shapes.declared import OwnSizes
from millrace.plan.step import Admission, StepPlan, exact_shape
from millrace.run.device.device import open_device
from millrace.run.runner import Runner
from millrace.run.settings import RunnerSettings

ROWS, BLOCK = 6, 4
NOTHING = np.zeros(0, np.int32)

pytestmark = pytest.mark.skipif(bool(native.native_missing(torch.device("cpu"))), reason="no native kernels here")


def make_runner(case: str, dtype: torch.dtype, **settings: int) -> Runner:
    model = make_reference(case)
    spec = spec_from_config(config_of(model))
    device = open_device(RunConfig(device="cpu", threads=2))
    decoder = build_decoder(spec, StateDictSource.of(model), device=device.torch_device, dtype=dtype)
    sizes = {"num_blocks": 100, "block_size": BLOCK, "max_rows": ROWS, "max_context": 60}
    return Runner(decoder, device, RunnerSettings(**sizes, **settings))


def plan_of(step_no: int, rows: list[tuple[int, int, int, bool]], admitted: tuple[Admission, ...] = ()) -> StepPlan:
    """Rows are (table row, start, count, draws)."""
    columns = np.asarray([row[:3] for row in rows], np.int32).T.copy()
    blocks = [(row, column, 1 + row * 15 + column) for row in range(ROWS) for column in range(15)] if admitted else []
    block_rows, block_cols, block_ids = np.asarray(blocks, np.int32).reshape(-1, 3).T.copy()
    return StepPlan(
        step_no=step_no,
        rows=columns[0],
        starts=columns[1],
        counts=columns[2],
        samples=np.asarray([row[3] for row in rows]),
        block_rows=block_rows,
        block_cols=block_cols,
        block_ids=block_ids,
        shape=exact_shape(columns[2]),
        admitted=admitted,
    )


def plans(params: list[SamplingParams]) -> list[StepPlan]:
    """Prompts that arrive in chunks while others decode."""
    draw = random.Random(3)
    prompts = [np.asarray(draw.choices(range(VOCAB), k=draw.randint(1, 19)), np.int32) for _ in range(ROWS)]
    admitted = tuple(
        Admission(row, 100 + row, tokens, len(tokens), RowParams(own, (2,)))
        for row, (tokens, own) in enumerate(zip(prompts, params, strict=True))
    )
    computed, made = [0] * ROWS, []
    for step_no in range(14):
        rows = []
        for row in draw.sample(range(ROWS), draw.randint(1, ROWS)):
            left = len(prompts[row]) - computed[row]
            count = min(left, draw.choice((1, 3, 7, 20))) if left > 0 else 1
            computed[row] += count
            rows.append((row, computed[row] - count, count, computed[row] >= len(prompts[row])))
        made.append(plan_of(step_no, rows, admitted if step_no == 0 else ()))
    return made


def drawn_by(runner: Runner, steps: list[StepPlan]) -> list[list[int]]:
    return [runner.launch(plan).wait().tokens.tolist() for plan in steps]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["llama_tied", "gemma3", "qwen3_bias_tied"])
def test_whole_steps_draw_the_same_tokens(case: str, dtype: torch.dtype) -> None:
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, seed=3),
        SamplingParams(temperature=0.7, top_p=0.8, seed=2**63 + 5),
        SamplingParams(temperature=1.2, top_k=5, seed=0),
        SamplingParams(temperature=0.9, min_p=0.1, seed=77),
        SamplingParams(temperature=0.0),
    ]
    steps = plans(params)
    whole, apart = make_runner(case, dtype), make_runner(case, dtype)
    assert whole.native_step is not None
    assert all(whole.native_step.can_run(plan) for plan in steps[1:])
    # Without the native step, which cannot be switched off.
    apart.native_step = None
    assert drawn_by(whole, steps) == drawn_by(apart, steps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whole_steps_with_adapters_draw_the_tokens_of_single_ops(dtype: torch.dtype, tmp_path: Path) -> None:
    """Beside rows of the base model, in prompts and decode rows, for adapters with and without the MLP."""
    runners = [make_runner("llama_tied", dtype, adapter_slots=3) for _ in range(3)]
    whole, stack_alone, single_ops = runners
    assert whole.native_step is not None
    # Without the native step and stack, which cannot be switched off.
    stack_alone.native_step = single_ops.native_step = None
    single_ops.decoder.native_stack = None
    model = make_reference("llama_tied")
    for slot, (rank, targets) in enumerate([(5, ("q_proj", "v_proj")), (16, (*ATTENTION, *MLP)), (3, MLP)], 1):
        path = write_adapter(tmp_path / str(slot), model, rank=rank, targets=targets, seed=slot, size=1.5)
        for runner in runners:
            slots = runner.slots
            assert slots is not None
            adapter = read_adapter(path, slots.targets, slots.dtype, max_rank=16, max_bytes=1 << 20)
            assert runner.fill_slot(slot, adapter)()
    steps = plans([SamplingParams(temperature=0.0)] * ROWS)
    base = drawn_by(whole, steps)
    for admission in steps[0].admitted:
        admission.adapter = admission.row % 4
    steps = [replace(plan, shape=replace(plan.shape, key=OwnSizes.WITH_ADAPTERS)) for plan in steps]
    assert all(whole.native_step.can_run(plan) for plan in steps[1:])
    found = [drawn_by(runner, steps) for runner in runners]
    assert found[0] == found[1] == found[2]
    assert found[0] != base, "adapters without an effect prove nothing"


@pytest.mark.parametrize("case", ["llama", "gemma2"])
def test_models_without_a_tied_head_or_with_a_softcap_have_no_native_step(case: str) -> None:
    runner = make_runner(case, torch.float32)
    assert runner.native_step is None
    steps = plans([SamplingParams(temperature=0.0)] * ROWS)
    assert all(0 <= token < VOCAB for tokens in drawn_by(runner, steps) for token in tokens)


def test_rows_with_logprobs_bias_or_penalties_are_not_run_natively() -> None:
    special = [
        SamplingParams(logprobs=2),
        SamplingParams(min_tokens=3),
        SamplingParams(logit_bias=((1, 5.0),)),
        SamplingParams(presence_penalty=0.5),
        SamplingParams(prompt_logprobs=1),
        SamplingParams(temperature=0.0),
    ]
    runner = make_runner("llama_tied", torch.float32)
    steps = plans(special)
    drawn_by(runner, steps[:1])
    assert runner.native_step is not None
    taken = [row for row in range(ROWS) if runner.native_step.can_run(plan_of(1, [(row, 0, 1, True)]))]
    assert taken == [4, 5]
    assert not runner.native_step.can_run(replace(plan_of(1, [(4, 0, 1, True)]), scored=np.array([True])))


def test_an_id_outside_the_vocabulary_is_an_error() -> None:
    runner = make_runner("llama_tied", torch.float32)
    admitted = Admission(0, 1, np.asarray([3, VOCAB], np.int32), 2, RowParams(SamplingParams()))
    with pytest.raises(IndexError, match=str(VOCAB)):
        runner.launch(plan_of(0, [(0, 0, 2, True)], (admitted,))).wait()
