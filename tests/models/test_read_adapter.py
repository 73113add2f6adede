"""Adapters that cannot be applied, or whose files are damaged or hostile, are refused by name, on the host."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.adapter_files import write_adapter
from helpers.tiny_models import config_of, make_reference
from safetensors.torch import load_file, save_file

from millrace.errors import AdapterError
from millrace.models.adapters.read import Adapter, read_adapter
from millrace.models.adapters.targets import targets_of
from millrace.models.spec.families import spec_from_config

Change = Callable[[Path], object]
Q = "base_model.model.model.layers.0.self_attn.q_proj"


@cache
def model() -> Any:
    return make_reference("llama")


def read(folder: Path, **limits: int) -> Adapter:
    targets = targets_of(spec_from_config(config_of(model())))
    return read_adapter(folder, targets, torch.float32, **{"max_rank": 64, "max_bytes": 1 << 24, **limits})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter", model(), rank=4)


def config(**values: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    def write(folder: Path) -> None:
        found = load_file(folder / "adapter_model.safetensors")
        change(found)
        save_file(found, folder / "adapter_model.safetensors")

    return write


def with_tensor(name: str, *shape: int) -> Change:
    return tensors(lambda found: found.update({name: torch.ones(shape)}))


def pickled(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def cut(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


REFUSED: dict[str, tuple[Change, str]] = {
    "DoRA": (config(use_dora=True), "DoRA"),
    "biases": (config(bias="lora_only"), "its own biases"),
    "whole modules": (config(modules_to_save=["lm_head"]), "modules_to_save has lm_head"),
    "another method": (config(peft_type="IA3"), "peft_type is 'IA3'; only LORA"),
    "rank 0": (config(r=0), "ranks are integers from 1 to 256"),
    "endless alpha": (config(lora_alpha=1e999), "not a finite number"),
    "a pattern": (config(rank_pattern={"(": 2}), "no regular expression"),
    "no JSON": (lambda folder: (folder / "adapter_config.json").write_text("["), "cannot be read as JSON"),
    "a pickle": (pickled, "is a pickle, which can run any code when it is read; it was not opened"),
    "cut short": (cut, "cannot be read as safetensors"),
    "noise": (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"\xff" * 999), "cannot be read as"),
    "NaN": (tensors(lambda found: found[f"{Q}.lora_A.weight"].fill_(float("nan"))), "NaN or infinite"),
    "another shape": (with_tensor(f"{Q}.lora_A.weight", 4, 5), r"has shape \(4, 5\); this model"),
    "another rank": (config(r=5), r"has shape \(4, \d+\); this model and the adapter's ranks require \(5,"),
    "integers": (tensors(lambda found: found.update({f"{Q}.lora_A.weight": torch.ones(4, 64).int()})), "int32|shape"),
    "no B": (tensors(lambda found: found.pop(f"{Q}.lora_B.weight")), "q_proj has no lora_B.weight"),
    "another model": (with_tensor("base_model.model.encoder.layer.0.query.lora_A.weight", 4, 4), "no lora_B"),
    "an embedding": (with_tensor("base_model.model.model.embed_tokens.lora_embedding_A", 4, 4), "of an embedding"),
    "a head": (with_tensor("base_model.model.lm_head.lora_A.weight", 4, 4), "the adapter has an LM head"),
    "magnitudes": (with_tensor(f"{Q}.lora_magnitude_vector", 4), "DoRA's magnitudes"),
    "experts": (with_tensor("base_model.model.model.layers.0.mlp.experts.0.up_proj.lora_A.weight", 4, 4), "of experts"),
    "nothing": (tensors(dict.clear), "no LoRA matrices"),
}


@pytest.mark.parametrize(("change", "says"), REFUSED.values(), ids=REFUSED)
def test_refused_by_name(folder: Path, change: Change, says: str) -> None:
    change(folder)
    with pytest.raises(AdapterError, match=says) as refused:
        read(folder)
    assert str(folder) in refused.value.message


def test_limits_of_the_server(folder: Path) -> None:
    with pytest.raises(AdapterError, match=r"has rank 4; .* at most 2\. Raise --max-lora-rank"):
        read(folder, max_rank=2)
    with pytest.raises(AdapterError, match=r"at most 100 are read\. Raise --adapter-memory"):
        read(folder, max_bytes=100)


def test_the_digest_names_the_content(folder: Path) -> None:
    first = read(folder).digest
    assert read(folder).digest == first
    config(lora_alpha=3)(folder)
    assert read(folder).digest != first
