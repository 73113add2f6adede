"""Safetensors: what transformers saves is read back, in one file or many; damaged files are explained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from millrace.errors import ModelError
from millrace.models.spec.families import spec_from_config
from millrace.models.spec.layout import all_tensors, layout_of
from millrace.models.weights import WeightSource, open_weights
from millrace.sources.resolve import resolve_model

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"head_dim": 16},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "gemma2": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16},
    "smollm3": {"pad_token_id": 0},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16},
}
EXPERTS = ("mixtral", "qwen3_moe")


def make_model(family: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(5)
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family]})
    return AutoModelForCausalLM.from_config(config).to(dtype).eval()


def save(folder: Path, family: str = "llama", **options: Any) -> Any:
    model = make_model(family, options.pop("dtype", torch.float32))
    model.save_pretrained(folder, **options)
    return model


def open_folder(folder: Path) -> WeightSource:
    return open_weights(resolve_model(str(folder)))


def needed(folder: Path) -> dict[str, tuple[int, ...]]:
    layout = layout_of(spec_from_config(resolve_model(str(folder)).config))
    return {part.name: part.shape for part in all_tensors(layout)}


@pytest.mark.parametrize("shard_size", ["1GB", "20KB"])
@pytest.mark.parametrize("family", FAMILIES)
def test_saved_tensors_match_the_decoder(tmp_path: Path, family: str, shard_size: str) -> None:
    save(tmp_path, family, max_shard_size=shard_size)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert (len(files) > 1) == (shard_size == "20KB")
    weights = open_folder(tmp_path)
    stored = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert {name: weights.shape(name) for name in weights.names()} == needed(tmp_path)
    for name in weights.names():
        assert torch.equal(weights.get(name), stored[name]), name
        assert weights.file_of(name) in files


@pytest.mark.parametrize("family", EXPERTS)
def test_stacked_experts_are_split(tmp_path: Path, family: str) -> None:
    """A saved state dict has stacked experts; save_pretrained writes them one by one."""
    model = save(tmp_path, family)
    classic = load_file(tmp_path / "model.safetensors")
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    assert any(name.endswith("experts.gate_up_proj") for name in state)
    save_file(state, tmp_path / "model.safetensors")
    weights = open_folder(tmp_path)
    assert {name: weights.shape(name) for name in weights.names()} == needed(tmp_path)
    for name, tensor in classic.items():
        assert torch.equal(weights.get(name), tensor), name
    first = next(name for name in state if name.endswith("gate_up_proj"))
    save_file({**state, first: state[first].transpose(1, 2).contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"stacked experts .*gate_up_proj have shape .*hidden_size 32"):
        open_folder(tmp_path)


def test_types_are_kept_or_converted(tmp_path: Path) -> None:
    model = save(tmp_path, dtype=torch.bfloat16)
    weights, name = open_folder(tmp_path), "model.layers.0.mlp.up_proj.weight"
    expected = model.state_dict()[name]
    assert torch.equal(weights.get(name), expected)
    assert weights.get(name).dtype == torch.bfloat16
    assert torch.equal(weights.get(name, dtype=torch.float32), expected.float())
    assert weights.get(name, device=torch.device("cpu"), dtype=torch.float16).dtype == torch.float16


def test_a_text_model_inside_a_larger_one(tmp_path: Path) -> None:
    model = save(tmp_path)
    state = model.state_dict()
    for old, new in (("model.", "language_model.model."), ("model.", "model.language_model.")):
        renamed = {name.replace(old, new, 1): tensor for name, tensor in state.items() if name.startswith(old)}
        head = "language_model.lm_head.weight" if new.startswith("language") else "lm_head.weight"
        other = {"vision_tower.patch.weight": torch.ones(2), "model.multi_modal_projector.weight": torch.ones(2)}
        save_file({**renamed, head: state["lm_head.weight"], **other}, tmp_path / "model.safetensors")
        weights = open_folder(tmp_path)
        assert set(weights.names()) == set(state)
        assert all(torch.equal(weights.get(name), tensor) for name, tensor in state.items())


def test_a_decoder_saved_without_its_head(tmp_path: Path) -> None:
    model = save(tmp_path, "qwen2")
    state = {name.removeprefix("model."): t for name, t in model.model.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    assert set(open_folder(tmp_path).names()) == set(needed(tmp_path))


def test_a_missing_name_a_missing_shard_and_a_shard_that_lacks_its_tensor(tmp_path: Path) -> None:
    save(tmp_path, max_shard_size="20KB")
    weights = open_folder(tmp_path)
    with pytest.raises(ModelError, match=r"has no tensor model.layers.9.mlp.up_proj.weight"):
        weights.get("model.layers.9.mlp.up_proj.weight")
    files = resolve_model(str(tmp_path))
    last = files.weights[-1]
    tensors = load_file(last)
    gone = next(iter(tensors))
    save_file({"other": torch.ones(1), **{k: v for k, v in tensors.items() if k != gone}}, last)
    with pytest.raises(ModelError, match=rf"{last.name} has no tensor {gone}"):
        open_weights(files)
    last.unlink()
    with pytest.raises(ModelError, match=rf"no file .*{last.name}"):
        open_weights(files)


def test_the_same_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    save(tmp_path, max_shard_size="20KB")
    first, *_, last = resolve_model(str(tmp_path)).weights
    save_file({**load_file(last), **load_file(first)}, last)
    with pytest.raises(ModelError, match="is also in"):
        open_folder(tmp_path)


@pytest.mark.parametrize("damage", ["cut", "header", "empty", "text"])
def test_damaged_files_are_named(tmp_path: Path, damage: str) -> None:
    save(tmp_path)
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    huge = (2**60).to_bytes(8, "little")
    path.write_bytes({"cut": content[:-10], "header": huge + content[8:], "empty": b"", "text": b"hello"}[damage])
    with pytest.raises(ModelError, match=r"model.safetensors is not a readable safetensors file"):
        open_folder(tmp_path)


def test_random_damage_never_crashes(tmp_path: Path) -> None:
    save(tmp_path)
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    generator = torch.Generator().manual_seed(0)
    for _ in range(150):
        damaged = bytearray(content)
        for spot in torch.randint(0, 2000, (3,), generator=generator).tolist():
            damaged[spot] ^= 1 << (spot % 8)
        path.write_bytes(damaged)
        try:
            weights = open_folder(tmp_path)
            for name in weights.names():
                weights.get(name)
        except ModelError:
            continue


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    save(tmp_path)
    path = tmp_path / "model.safetensors"
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**load_file(path), name: torch.ones(48, 32, dtype=torch.int8)}, path)
    with pytest.raises(ModelError, match=rf"tensor {name} has the type I8.*GGUF"):
        open_folder(tmp_path).get(name)


def test_an_index_that_names_a_missing_tensor(tmp_path: Path) -> None:
    save(tmp_path)
    names = dict.fromkeys([*load_file(tmp_path / "model.safetensors"), "extra.weight"], "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(ModelError, match=r"has no tensor extra.weight"):
        open_folder(tmp_path)
