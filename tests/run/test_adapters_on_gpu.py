"""Adapters on CudaRunner: rows of several adapters and of the base model in one step give the tokens of the plain
runner, whose answers are held to merged models.

On a GPU this replays graphs; elsewhere the same code runs uncaptured, its kernels interpreted.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import msgspec
import pytest
import torch
from helpers.adapter_files import ATTENTION, MLP, write_adapter
from helpers.decode_table import want_few_programs
from helpers.quick_interpreter import quick_interpreter
from helpers.tiny_models import make_reference
from helpers.triton_mode import device as place
from helpers.triton_mode import interpreted
from run.test_cuda_runner import BUDGET, GREEDY, SIZES, decoder_for, drive, requests, with_prompts

from millrace.config import RunConfig
from millrace.models.adapters.read import Adapter, read_adapter
from millrace.models.adapters.targets import targets_of
from millrace.ops.lora.add import make_triton
from millrace.plan.request import Request
from millrace.plan.step import ALL_LINEARS, QKV_ALONE, StepPlan
from millrace.run.cuda_runner import CudaRunner
from millrace.run.device.device import CpuDevice, open_device
from millrace.run.runner import Runner
from millrace.run.settings import RunnerSettings

LENGTHS = (2, 7, 5)
SHAPES = ((4, ("q_proj", "v_proj")), (16, (*ATTENTION, *MLP)), (3, MLP))


def adapters_in(folder: Path, runner: Runner | CudaRunner) -> list[Adapter]:
    model, spec = make_reference("qwen3", num_hidden_layers=2), runner.decoder.spec
    found = []
    for index, (rank, targets) in enumerate(SHAPES):
        path = write_adapter(folder / f"a{index}", model, rank=rank, targets=targets, seed=index, size=1.5)
        adapter = read_adapter(path, targets_of(spec), torch.float32, max_rank=64, max_bytes=1 << 30)
        found.append(adapter if interpreted else adapter.on(adapter.data.pin_memory()))
    return found


def fill(runner: Runner | CudaRunner, slot: int, adapter: Adapter) -> None:
    is_ready = runner.fill_slot(slot, adapter)
    if not interpreted:
        torch.cuda.synchronize()
    assert is_ready()


def with_adapters(asked: list[Request], slots: tuple[int, ...], changes: int = ALL_LINEARS) -> list[Request]:
    for request in asked:
        request.adapter, request.adapter_changes = slots[request.id % len(slots)], changes
        request.salt = b"%d" % request.adapter
    return asked


def fast_runner(**settings: object) -> CudaRunner:
    device = open_device(RunConfig(device="cuda")) if place.type == "cuda" else CpuDevice(1)
    settings = {"token_budget": BUDGET, "adapter_slots": 2, **SIZES, **settings}
    runner = CudaRunner(decoder_for("qwen3", place, True), device, RunnerSettings(**settings))
    if interpreted:  # Loading offers no GPU's op on a CPU.
        runner.slots.op = make_triton()
    return runner


def test_same_tokens_as_the_plain_runner_also_after_a_slot_was_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if interpreted:
        want_few_programs(monkeypatch)
    plain = Runner(
        decoder_for("qwen3", torch.device("cpu"), False), CpuDevice(1), RunnerSettings(adapter_slots=2, **SIZES)
    )
    fast = fast_runner()
    plans: list[StepPlan] = []
    forward = fast.run_forward
    # Records what the runner does itself: tokens do not show it.
    monkeypatch.setattr(fast, "run_forward", lambda plan: plans.append(plan) or forward(plan))
    few = [msgspec.structs.replace(GREEDY, max_tokens=3)]
    answers = []
    for runner in (plain, fast):
        first, second, third = adapters_in(tmp_path, runner)
        fill(runner, 1, first)
        fill(runner, 2, second)
        with quick_interpreter() if interpreted and runner is fast else nullcontext():
            before, _ = drive(runner, with_adapters(with_prompts(requests(3, 1, few), LENGTHS), (0, 1, 2)))
            fill(runner, 1, third)
            after, _ = drive(runner, with_adapters(with_prompts(requests(2, 1, few), LENGTHS[:2]), (0, 1)))
            alone, _ = drive(runner, with_prompts(requests(2, 1, few), LENGTHS[:2]))
            assert first.qkv_alone
            fill(runner, 1, first)
            inner, _ = drive(runner, with_adapters(with_prompts(requests(2, 1, few), LENGTHS[:2]), (0, 1), QKV_ALONE))
        answers.append((before, after, alone, inner))
    assert answers[1] == answers[0]
    before, after, alone, inner = answers[0]
    assert before[0] == after[0] == alone[0]
    assert inner == {index: before[index] for index in inner}
    assert len({tuple(one[1]) for one in (before, after, alone)}) == 3, "adapters without an effect prove nothing"
    key_of = fast.shapes.table.key_of
    kinds = {(plan.shape.kind == "decode", key_of(plan.shape).adapters) for plan in plans}
    assert kinds == {(is_decode, changes) for is_decode in (False, True) for changes in (0, QKV_ALONE, ALL_LINEARS)}
