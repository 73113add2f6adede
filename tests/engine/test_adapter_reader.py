"""The process that reads adapters: what it reads, what it refuses, and what happens when it ends."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.adapter_files import ATTENTION, MLP, write_adapter
from helpers.tiny_models import config_of, make_reference
from safetensors.torch import load_file, save_file

from millrace.engine.adapters.reader import AdapterReader
from millrace.engine.adapters.reader_child import NICE
from millrace.errors import AdapterError
from millrace.models.adapters.files import Limits
from millrace.models.adapters.read import read_adapter
from millrace.models.adapters.targets import AdapterTargets, targets_of
from millrace.models.spec.families import spec_from_config

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]
LIMITS = Limits(64, 1 << 24)


@pytest.fixture(scope="module")
def model() -> Any:
    return make_reference("llama")


@pytest.fixture(scope="module")
def targets(model: Any) -> AdapterTargets:
    return targets_of(spec_from_config(config_of(model)))


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some of its tensors are wider or narrower than the others."""
    path = write_adapter(tmp_path_factory.mktemp("adapter"), model, rank=5, targets=(*ATTENTION, *MLP))
    tensors = load_file(path / "adapter_model.safetensors")
    kinds = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
    mixed = {name: one.to(kinds[index % 4]) for index, (name, one) in enumerate(tensors.items())}
    save_file(mixed, path / "adapter_model.safetensors")
    return path


@pytest.fixture(scope="module")
def reader(targets: AdapterTargets) -> Iterator[AdapterReader]:
    reader = AdapterReader(targets, torch.float32, LIMITS)
    yield reader
    reader.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_matrix_arrives_in_the_models_type(targets: AdapterTargets, folder: Path, dtype: torch.dtype) -> None:
    reader = AdapterReader(targets, dtype, LIMITS)
    try:
        adapter = reader(folder)
    finally:
        reader.close()
    tensors, count = load_file(folder / "adapter_model.safetensors"), 0
    for index, linear in adapter.linears.items():
        target = targets.linears[index]
        assert target is not None
        parts = linear.parts(target.in_features, target.out_sizes)
        for module, (_, _, a, b, scale) in zip(target.modules, parts, strict=True):
            prefix = f"base_model.model.{module}"
            assert torch.equal(a, tensors[f"{prefix}.lora_A.weight"].to(dtype))
            assert torch.equal(b, tensors[f"{prefix}.lora_B.weight"].to(dtype).t())
            assert scale == 16.0 / 5
            count += 2
    assert count == len(tensors)
    assert (adapter.max_rank, adapter.base_model, adapter.folder) == (5, "tiny", folder)


def test_files_in_bfloat16_stay_so_beside_a_model_in_float32(
    model: Any, targets: AdapterTargets, folder: Path, tmp_path: Path
) -> None:
    path = write_adapter(tmp_path / "adapter", model, rank=5)
    tensors = load_file(path / "adapter_model.safetensors")
    save_file({name: one.bfloat16() for name, one in tensors.items()}, path / "adapter_model.safetensors")
    reader = AdapterReader(targets, torch.float32, replace(LIMITS, keeps_bfloat16=True))
    try:
        kept, mixed = reader(path), reader(folder)
    finally:
        reader.close()
    widened = read_adapter(path, targets, torch.float32, max_rank=64, max_bytes=1 << 24)
    assert torch.equal(kept.data.float(), widened.data)
    assert (kept.data.dtype, mixed.data.dtype) == (torch.bfloat16, torch.float32), "only if all of it is"
    assert 2 * kept.num_bytes == widened.num_bytes


def test_a_refusal_is_a_sentence_and_the_next_one_is_read(reader: AdapterReader, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "IA3"}))
    pid = reader.pid
    with pytest.raises(AdapterError, match="peft_type is 'IA3'; only LORA"):
        reader(tmp_path)
    assert reader(folder).max_rank == 5
    assert reader.pid == pid


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux alone has it")
def test_the_process_yields_its_core_to_steps(reader: AdapterReader, folder: Path) -> None:
    reader(folder)
    assert os.sched_getscheduler(reader.pid) == os.SCHED_BATCH
    assert os.getpriority(os.PRIO_PROCESS, reader.pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICE)


def test_a_process_that_was_ended_is_replaced(reader: AdapterReader, folder: Path) -> None:
    before = reader.pid
    os.kill(before, signal.SIGKILL)
    reader.process.wait(60)
    assert reader(folder).max_rank == 5
    assert reader.pid != before


def test_a_process_that_does_not_answer_is_ended_in_time(targets: AdapterTargets, folder: Path) -> None:
    reader = AdapterReader(targets, torch.float32, LIMITS, limit_s=0.2)
    try:
        os.kill(reader.pid, signal.SIGSTOP)
        with pytest.raises(AdapterError, match=r"has not answered for 0\.2 s. Send a request for it again"):
            reader(folder)
        assert reader.process.poll() is not None
    finally:
        reader.close()
