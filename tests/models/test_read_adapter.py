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
INNER = "layers.0.self_attn.q_proj"
Q = f"base_model.model.model.{INNER}"


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


def twice(module: str) -> Change:
    """The matrices of Q again, under this name."""
    names = [(f"{Q}.lora_{one}.weight", f"{module}.lora_{one}.weight") for one in "AB"]
    return tensors(lambda found: found.update({new: found[old].clone() for old, new in names}))


def pickled(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def cut(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


REFUSED: dict[str, tuple[Change, str]] = {
    "DoRA": (config(use_dora=True), r"DoRA, which scales .* Train it without use_dora, or merge it .*`millrace merge`"),
    "PiSSA": (config(init_lora_weights="pissa_niter_4"), "changes the base's weights too.*weight_conversion"),
    "OLoRA": (config(init_lora_weights="olora"), "changes the base's weights too"),
    "LoftQ": (config(init_lora_weights="loftq"), "changes the base's weights too"),
    "biases": (config(bias="lora_only"), "its own biases.*bias='none', or merge it"),
    "whole modules": (config(modules_to_save=["lm_head"]), "modules_to_save has lm_head"),
    "another method": (config(peft_type="IA3"), "peft_type is 'IA3'; only LORA"),
    "rank 0": (config(r=0), "ranks are integers from 1 to 256"),
    "endless alpha": (config(lora_alpha=1e999), "not a finite number"),
    "a pattern": (config(rank_pattern={"(": 2}), "no regular expression"),
    "no JSON": (lambda folder: (folder / "adapter_config.json").write_text("["), "cannot be read as JSON"),
    "a pickle": (pickled, "is a pickle, which can run any code when it is read; it was not opened"),
    "several files": (
        lambda folder: (folder / "adapter_model.safetensors").rename(folder / "adapter_model-00001-of-2.safetensors"),
        "in several files .*Load the adapter with PEFT and save it again",
    ),
    "another directory": (
        lambda folder: (
            (folder / "checkpoint-5").mkdir()
            or (folder / "adapter_config.json").rename(folder / "checkpoint-5" / "adapter_config.json")
        ),
        r"no adapter_config.json\..* Name one of the adapters in it: checkpoint-5",
    ),
    "cut short": (cut, "cannot be read as safetensors"),
    "noise": (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"\xff" * 999), "cannot be read as"),
    "NaN": (tensors(lambda found: found[f"{Q}.lora_A.weight"].fill_(float("nan"))), "NaN or infinite"),
    "another shape": (with_tensor(f"{Q}.lora_A.weight", 4, 5), r"has shape \(4, 5\); this model"),
    "another rank": (config(r=5), r"has shape \(4, \d+\); this model and the adapter's ranks require \(5,"),
    "integers": (tensors(lambda found: found.update({f"{Q}.lora_A.weight": torch.ones(4, 64).int()})), "int32|shape"),
    "no B": (tensors(lambda found: found.pop(f"{Q}.lora_B.weight")), "q_proj has no lora_B.weight"),
    "another model": (with_tensor("base_model.model.encoder.layer.0.query.lora_A.weight", 4, 4), "no lora_B"),
    "an embedding": (with_tensor("base_model.model.model.embed_tokens.lora_embedding_A", 4, 4), "of an embedding"),
    "a head": (with_tensor("base_model.model.lm_head.lora_A.weight", 4, 4), "LoRA matrices of an LM head"),
    "a resized head": (with_tensor("base_model.model.lm_head.weight", 4, 4), "an LM head.*save_embedding_layers=False"),
    "a resized vocabulary": (
        with_tensor("base_model.model.model.embed_tokens.weight", 4, 4),
        "an embedding. If it was not trained .*save_embedding_layers=False; else merge it",
    ),
    "two names": (twice(f"base_model.model.{INNER}"), "two pairs of matrices for layers.0.self_attn.q_proj"),
    "a vision tower": (
        twice(f"base_model.model.vision_tower.model.{INNER}"),
        "a module that this model does not have .*vision_tower.model.layers.0",
    ),
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


@pytest.mark.parametrize(
    "prefix",
    [
        pytest.param("", id="none"),
        pytest.param("base_model.model.", id="the model without a head, as embedders are trained"),
        pytest.param("base_model.model.model.language_model.", id="beside a vision tower"),
        pytest.param("base_model.model.language_model.model.", id="beside a vision tower, of older versions"),
        pytest.param("base_model.model._orig_mod.model.", id="compiled"),
        pytest.param("module.base_model.model.model.", id="distributed"),
    ],
)
def test_names_around_the_layers_depend_on_the_class_that_was_trained(folder: Path, prefix: str) -> None:
    right = read(folder)

    def renamed(found: dict[str, torch.Tensor]) -> None:
        for key in list(found):
            found[prefix + key.removeprefix("base_model.model.model.")] = found.pop(key)

    tensors(renamed)(folder)
    assert torch.equal(read(folder).data, right.data)


def test_a_config_with_a_byte_order_mark_is_read(folder: Path) -> None:
    path = folder / "adapter_config.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read(folder).max_rank == 4
