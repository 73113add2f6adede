"""GGUF files give back the tensors and the config of the transformers model they were made from."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as T
from helpers.gguf_files import convert_state, split_fused_experts, write_gguf
from transformers import AutoConfig, AutoModelForCausalLM

from millrace.errors import ModelError
from millrace.models.spec.families import spec_from_config
from millrace.models.spec.layout import all_tensors, layout_of
from millrace.models.weights import WeightSource, open_weights
from millrace.sources.gguf.reader import read_gguf
from millrace.sources.resolve import ModelFiles, resolve_model

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
ARCHES = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True, "rope_theta": 500000.0}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "mistral": ("llama", {"sliding_window": 16, "head_dim": 32}),
    "mixtral": ("llama", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3_moe": (
        "qwen3moe",
        {
            "head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
    "gemma2": ("gemma2", {"head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 32}),
    "gemma3_text": (
        "gemma3",
        {
            "head_dim": 32,
            "sliding_window": 16,
            "query_pre_attn_scalar": 32,
            "num_hidden_layers": 7,
        },
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "pad_token_id": 0}),
}


def make_model(case: str) -> tuple[str, Any]:
    arch, changes = ARCHES[case]
    torch.manual_seed(len(case))
    config = AutoConfig.for_model(case.partition("-")[0], **{**SIZES, **changes})
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    return arch, model


def metadata_of(arch: str, config: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
    }
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    found["rope.freq_base"] = float(rope["rope_theta"])
    if getattr(config, "sliding_window", None):
        found["attention.sliding_window"] = config.sliding_window
    if arch == "gemma2":
        found["attn_logit_softcapping"] = config.attn_logit_softcapping
        found["final_logit_softcapping"] = config.final_logit_softcapping
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if experts:
        found |= {"expert_count": experts, "expert_used_count": config.num_experts_per_tok}
    if arch == "qwen3moe":
        found["expert_feed_forward_length"] = config.moe_intermediate_size
    return {f"{arch}.{key}": value for key, value in found.items()}


def stored_state(model: Any) -> dict[str, torch.Tensor]:
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    return dict(state)


def expected_tensors(model: Any) -> dict[str, torch.Tensor]:
    """The state dict under classic names, with stacked experts split."""
    found: dict[str, torch.Tensor] = {}
    is_mixtral = model.config.model_type == "mixtral"
    owns = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    for name, tensor in stored_state(model).items():
        name = name.replace("mlp.gate.weight", "block_sparse_moe.gate.weight") if is_mixtral else name
        match = re.fullmatch(r"(.+)\.mlp\.experts\.(gate_up_proj|down_proj)", name)
        if match is None:
            found[name] = tensor
            continue
        base = f"{match[1]}.{'block_sparse_moe' if is_mixtral else 'mlp'}.experts"
        for expert, weight in enumerate(tensor):
            pieces = weight.chunk(2) if match[2] == "gate_up_proj" else (weight,)
            names = owns[:2] if match[2] == "gate_up_proj" else owns[2:]
            found |= {f"{base}.{expert}.{own}.weight": piece for own, piece in zip(names, pieces, strict=True)}
    return found


def open_case(tmp_path: Path, case: str, fused_experts: bool = False) -> tuple[ModelFiles, WeightSource, Any]:
    arch, model = make_model(case)
    config = model.config
    tensors = convert_state(stored_state(model), arch, config.num_attention_heads, config.num_key_value_heads)
    if not fused_experts:
        tensors = split_fused_experts(tensors)
    path = write_gguf(tmp_path / f"{case}.gguf", metadata_of(arch, config), tensors, arch)
    files = resolve_model(str(path))
    return files, open_weights(files), model


@pytest.mark.parametrize("case", ARCHES)
def test_tensors_have_their_names_shapes_and_values_back(tmp_path: Path, case: str) -> None:
    _, weights, model = open_case(tmp_path, case)
    expected = expected_tensors(model)
    assert set(weights.names()) == set(expected)
    for name, tensor in expected.items():
        assert weights.shape(name) == tuple(tensor.shape), name
        found = weights.get(name)
        # Gemma's norms lose a bit when one is added; everything else is exact.
        tolerance = 1e-6 if "gemma" in case and name.endswith("norm.weight") else 0.0
        torch.testing.assert_close(found, tensor, rtol=0.0, atol=tolerance, msg=name)


@pytest.mark.parametrize("case", ARCHES)
def test_the_config_describes_the_same_decoder(tmp_path: Path, case: str) -> None:
    files, weights, model = open_case(tmp_path, case)
    ours, theirs = spec_from_config(files.config), spec_from_config(model.config.to_dict())
    assert ours == theirs
    assert {part.name: part.shape for part in all_tensors(layout_of(ours))} == {
        name: weights.shape(name) for name in weights.names()
    }


@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe"])
def test_fused_gates_and_ups(tmp_path: Path, case: str) -> None:
    _, weights, model = open_case(tmp_path, case, fused_experts=True)
    expected = expected_tensors(model)
    assert set(weights.names()) == set(expected)
    assert all(torch.equal(weights.get(name), tensor) for name, tensor in expected.items())


def rewrite(tmp_path: Path, case: str, change: Any) -> WeightSource:
    """Open the case's file after `change` has edited its tensors."""
    arch, model = make_model(case)
    config = model.config
    tensors = split_fused_experts(
        convert_state(stored_state(model), arch, config.num_attention_heads, config.num_key_value_heads)
    )
    change(tensors)
    path = write_gguf(tmp_path / f"{case}.gguf", metadata_of(arch, config), tensors, arch)
    return open_weights(resolve_model(str(path)))


def test_experts_in_tensors_of_their_own(tmp_path: Path) -> None:
    def take_apart(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if "_exps" in name]:
            for expert, weight in enumerate(tensors[name]):
                tensors[name.replace("_exps.", f".{expert}.")] = weight
            del tensors[name]

    weights = rewrite(tmp_path, "mixtral", take_apart)
    expected = expected_tensors(make_model("mixtral")[1])
    assert set(weights.names()) == set(expected)
    assert all(torch.equal(weights.get(name), tensor) for name, tensor in expected.items())


def test_fused_queries_keys_and_values(tmp_path: Path) -> None:
    def fuse(tensors: dict[str, Any]) -> None:
        for layer, kind in itertools.product(range(3), ("weight", "bias")):
            parts = [tensors.pop(f"blk.{layer}.attn_{part}.{kind}") for part in "qkv"]
            tensors[f"blk.{layer}.attn_qkv.{kind}"] = np.concatenate(parts)

    weights = rewrite(tmp_path, "llama", fuse)
    expected = expected_tensors(make_model("llama")[1])
    assert set(weights.names()) == set(expected)
    assert all(torch.equal(weights.get(name), tensor) for name, tensor in expected.items())


def test_quantised_heads_are_reordered_before_decoding(tmp_path: Path) -> None:
    values = {}

    def quantise(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if re.search(r"attn_[qk]\.weight", name)]:
            raw = gguf.quants.quantize(tensors[name], T.Q8_0)
            values[name] = gguf.quants.dequantize(raw, T.Q8_0)
            tensors[name] = (raw, T.Q8_0)

    weights = rewrite(tmp_path, "llama", quantise)
    stored = values["blk.1.attn_q.weight"].reshape(4, 8, 2, 64)
    found = weights.get("model.layers.1.self_attn.q_proj.weight").numpy()
    for head in range(4):
        np.testing.assert_array_equal(found[head * 16 : head * 16 + 8], stored[head, :, 0])
        np.testing.assert_array_equal(found[head * 16 + 8 : head * 16 + 16], stored[head, :, 1])


def test_extra_factors_of_four_bit_files_are_applied(tmp_path: Path) -> None:
    def add_scales(tensors: dict[str, Any]) -> None:
        tensors["blk.0.ffn_gate_inp.scale"] = np.array([0.5], dtype=np.float32)
        tensors["blk.0.ffn_up_exps.scale"] = np.array([1, 2, 3, 4], dtype=np.float32)
        tensors["blk.0.ffn_up_exps.input_scale"] = np.array([9, 9, 9, 9], dtype=np.float32)

    weights = rewrite(tmp_path, "mixtral", add_scales)
    expected = expected_tensors(make_model("mixtral")[1])
    for name, factor in (("gate", 0.5), ("experts.2.w3", 3.0), ("experts.2.w1", 1.0)):
        full = f"model.layers.0.block_sparse_moe.{name}.weight"
        assert torch.equal(weights.get(full), expected[full] * factor)


def test_unknown_tensors_and_wrong_sizes_are_refused(tmp_path: Path) -> None:
    def add(name: str, array: Any) -> Any:
        return lambda tensors: tensors.__setitem__(name, array)

    row = np.zeros(64, dtype=np.float32)
    cases = [
        ("llama", add("blk.0.attn_sub_norm.weight", row), "attn_sub_norm.weight' does not belong to a llama model"),
        ("llama", add("blk.0.post_ffw_norm.weight", row), "does not belong"),
        ("llama", add("v.patch_embd.weight", row), "does not belong"),
        ("llama", add("blk.0.attn_q.3.weight", row), "does not belong"),
        ("llama", add("blk.0.attn_q.weight", np.zeros((63, 64), np.float32)), "not 4 heads of an even size"),
        ("mixtral", add("blk.0.ffn_up_exps.weight", np.zeros((3, 96, 64), np.float32)), "4 experts need 4"),
        ("llama", add("blk.0.ffn_up.weight", (np.zeros((96, 584), np.uint8), T.Q8_K)), "has the type Q8_K"),
        ("llama", add("blk.0.attn_v.bias", (np.zeros(34, np.uint8), T.Q8_0)), "vectors must not be quantised"),
    ]
    for index, (case, change, message) in enumerate(cases):
        folder = tmp_path / str(index)
        folder.mkdir()
        with pytest.raises(ModelError, match=message):
            rewrite(folder, case, change)


def test_a_missing_name_is_reported(tmp_path: Path) -> None:
    _, weights, _ = open_case(tmp_path, "llama-tied")
    for ask in (weights.get, weights.shape, weights.file_of):
        with pytest.raises(ModelError, match=r"llama-tied.gguf has no tensor for lm_head.weight"):
            ask("lm_head.weight")


def test_old_frequency_tensors_are_ignored(tmp_path: Path) -> None:
    def add(tensors: dict[str, Any]) -> None:
        tensors["rope_freqs.weight"] = np.ones(8, dtype=np.float32)
        tensors["blk.0.attn_rot_embd.weight"] = np.ones(8, dtype=np.float32)

    assert not [name for name in rewrite(tmp_path, "llama", add).names() if "rot" in name or "freq" in name]


@pytest.mark.parametrize("case", ["llama", "mixtral", "gemma3_text"])
def test_damaged_headers_give_an_error_or_whole_tensors(tmp_path: Path, case: str) -> None:
    files, _, _ = open_case(tmp_path, case)
    content, path = files.path.read_bytes(), tmp_path / "damaged.gguf"
    rng = np.random.default_rng(11)
    header = min(tensor.offset for tensor in read_gguf(files.path).tensors.values())
    for _ in range(400):
        damaged = bytearray(content)
        for spot in rng.integers(0, header, rng.integers(1, 4)):
            damaged[spot] = rng.integers(0, 256)
        path.write_bytes(damaged)
        try:
            weights = open_weights(resolve_model(str(path)))
            for name in weights.names():
                assert tuple(weights.get(name).shape) == weights.shape(name)
        except ModelError:
            continue
