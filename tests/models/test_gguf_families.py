"""GGUF files of families with sinks, latents, other norms and biased experts, against the `transformers` models that
they were made of. Names of tensors are those that the `gguf` package gives; names of metadata are its writer's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as T
from helpers.paged import PagedDriver
from helpers.tiny_models import CASES, VOCAB, StateDictSource, config_of, make_reference

from millrace.errors import ModelError
from millrace.models import kept_weights
from millrace.models import load as load_module
from millrace.models.formats.gguf import weight_of_blocks
from millrace.models.load import load_decoder
from millrace.models.spec.families import spec_from_config
from millrace.models.spec.shard import Cut
from millrace.models.weights import open_weights
from millrace.models.weights.gguf_weights import GgufWeights
from millrace.sources.resolve import resolve_model

CPU = torch.device("cpu")
TOKENS = [int(token) for token in np.random.default_rng(2).integers(0, VOCAB, 40)]
ARCHES = {
    "Olmo2": gguf.MODEL_ARCH.OLMO2,
    "Glm4": gguf.MODEL_ARCH.GLM4,
    "Phi3": gguf.MODEL_ARCH.PHI3,
    "GptOss": gguf.MODEL_ARCH.GPT_OSS,
    "DeepseekV2": gguf.MODEL_ARCH.DEEPSEEK2,
    "DeepseekV3": gguf.MODEL_ARCH.DEEPSEEK2,
    "Granite": gguf.MODEL_ARCH.GRANITE,
    "GraniteMoe": gguf.MODEL_ARCH.GRANITE_MOE,
    "Cohere": gguf.MODEL_ARCH.COMMAND_R,
    "Cohere2": gguf.MODEL_ARCH.COHERE2,
    "Starcoder2": gguf.MODEL_ARCH.STARCODER2,
    "StableLm": gguf.MODEL_ARCH.STABLELM,
    "Phi": gguf.MODEL_ARCH.PHI2,
    "Nemotron": gguf.MODEL_ARCH.NEMOTRON,
    "Arcee": gguf.MODEL_ARCH.ARCEE,
    "Olmo": gguf.MODEL_ARCH.OLMO,
    "Gemma": gguf.MODEL_ARCH.GEMMA,
    "Ernie4_5": gguf.MODEL_ARCH.ERNIE4_5,
    "SeedOss": gguf.MODEL_ARCH.SEED_OSS,
    "Lfm2": gguf.MODEL_ARCH.LFM2,
    "Lfm2Moe": gguf.MODEL_ARCH.LFM2MOE,
}
PERMUTED = ("Granite", "GraniteMoe", "Arcee", "Olmo")
"""Files hold queries and keys for rotation of neighbouring dimensions."""
_YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 32}
_EQUAL = {"rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.7}}
PHI3_SCALE = 1.03125
"""Of rotated queries and keys."""
CHANGES: dict[str, dict[str, Any]] = {
    # What a file cannot say is as in every model of the family.
    "gpt_oss": {"swiglu_limit": 7.0, "hidden_size": 64, "intermediate_size": 96},
    "phi3_longrope": {
        "rope_parameters": CASES["phi3_longrope"][1]["rope_parameters"] | {"attention_factor": PHI3_SCALE}
    },
    "lfm2_moe": {"routed_scaling_factor": 1.0},
    "cohere2": {"sliding_window_pattern": 4, "num_hidden_layers": 5},
    "deepseek_v2_groups": {"attention_bias": False, **_EQUAL},
    "deepseek_v3": {**_EQUAL, "routed_scaling_factor": 1.7},
}


def converted(model: Any, kind: str, split_latents: bool, mxfp4: bool) -> dict[str, Any]:
    """The tensors as llama.cpp's converter arranges them."""
    config, arch = model.config, ARCHES[kind]
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    stored = {name: tensor.float().numpy() for name, tensor in StateDictSource.of(model).tensors.items()}
    experts: dict[str, list[Any]] = {}
    found: dict[str, Any] = {}
    for name, array in stored.items():
        match = re.fullmatch(r"(.+\.mlp\.experts)\.\d+\.(.+)", name)
        if match is not None:
            experts.setdefault(f"{match[1]}.{match[2]}", []).append(array)
            continue
        if split_latents and name.endswith("kv_b_proj.weight"):
            heads = array.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
            keys, values = heads[:, : config.qk_nope_head_dim], heads[:, config.qk_nope_head_dim :]
            found[name.replace("kv_b_proj", "k_b_proj")] = keys.swapaxes(1, 2)
            found[name.replace("kv_b_proj", "v_b_proj")] = values
            continue
        if kind in ("Nemotron", "Gemma") and name.endswith("norm.weight"):
            array = array + 1
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if kind in PERMUTED and f".{part}." in name:
                pairs = array.reshape(heads, 2, -1, *array.shape[1:])
                array = pairs.swapaxes(1, 2).reshape(array.shape)
        if kind.startswith("Lfm2"):
            name = name.replace("model.norm.", "model.embedding_norm.")
            name = name.replace("mlp.gate.e_score_correction_bias", "feed_forward.expert_bias.bias")
            array = array.squeeze(1) if name.endswith(".conv.conv.weight") else array
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        found[name + ".weight" if name.endswith("sinks") else name] = array
    found |= {name: np.stack(parts) for name, parts in experts.items()}
    renamed = {names.get_name(name, try_suffixes=(".weight", ".bias")): array for name, array in found.items()}
    assert None not in renamed
    if mxfp4:
        for name in [name for name in renamed if name.endswith("_exps.weight")]:
            renamed[name] = gguf.quants.quantize(renamed[name], T.MXFP4)
    return renamed


def add_metadata(writer: gguf.GGUFWriter, model: Any, split_latents: bool) -> None:
    config = model.config
    rope, is_lfm2 = config.rope_parameters, config.model_type.startswith("lfm2")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    inner = model.get_submodule("model.layers.0.feed_forward.w1").out_features if is_lfm2 else config.intermediate_size
    writer.add_feed_forward_length(inner)
    writer.add_head_count(config.num_attention_heads)
    add_norms_and_scales(writer, config)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if config.model_type.startswith("deepseek"):
        return add_latents(writer, config, split_latents)
    kv_heads = [config.num_key_value_heads * (kind != "conv") for kind in config.layer_types or ()] if is_lfm2 else []
    writer.add_head_count_kv(kv_heads or config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if config.model_type == "phi3":
        writer.add_sliding_window(config.sliding_window or 0)
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        if rope["rope_type"] == "longrope":
            writer.add_rope_scaling_attn_factors(PHI3_SCALE)
            for kind in ("short", "long"):
                factors = np.array(rope[f"{kind}_factor"], np.float32)
                writer.add_tensor(f"rope_factors_{kind}.weight", factors)
    if config.model_type == "gpt_oss":
        writer.add_sliding_window(config.sliding_window)
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)


def add_norms_and_scales(writer: gguf.GGUFWriter, config: Any) -> None:
    layer = [getattr(config, key, None) for key in ("layer_norm_eps", "norm_epsilon", "norm_eps")]
    is_rms = config.model_type.startswith("lfm2")
    if is_rms:
        writer.add_layer_norm_rms_eps(config.norm_eps)
        writer.add_shortconv_l_cache(config.conv_L_cache)
    elif eps := next(filter(None, layer), None) or (config.model_type == "olmo" and 1e-5):
        writer.add_layer_norm_eps(eps)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if config.model_type.startswith("granite"):
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if config.model_type == "granitemoe":
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type == "lfm2_moe":
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if config.model_type.startswith("cohere"):
        writer.add_logit_scale(config.logit_scale)
    if config.model_type == "olmo":
        writer.add_clamp_kqv(config.clip_qkv)
    if config.model_type in ("cohere2", "starcoder2"):
        writer.add_sliding_window(config.sliding_window)


def add_latents(writer: gguf.GGUFWriter, config: Any, split_latents: bool) -> None:
    heads = (config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim)
    if split_latents:
        writer.add_head_count_kv(1)
        writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
        writer.add_value_length(config.kv_lora_rank)
        writer.add_key_length_mla(heads[0])
        writer.add_value_length_mla(heads[1])
    else:
        writer.add_head_count_kv(config.num_attention_heads)
        writer.add_key_length(heads[0])
        writer.add_value_length(heads[1])
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    if config.q_lora_rank:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    if config.norm_topk_prob:
        writer.add_expert_weights_norm(True)
    if (config.n_group or 1) > 1:
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    if config.model_type == "deepseek_v3":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if "mscale_all_dim" in config.rope_parameters:
        writer.add_rope_scaling_yarn_log_mul(0.1 * config.rope_parameters["mscale_all_dim"])


def write(
    path: Path,
    case: str,
    *,
    split_latents: bool = True,
    mxfp4: bool = False,
    factors: dict[str, Any] | None = None,
) -> Any:
    """The file of a case; its model. `factors`: by name, that a tensor's numbers were divided by."""
    model, kind = make_reference(case, **CHANGES.get(case, {})), CASES[case][0]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[ARCHES[kind]])
    add_metadata(writer, model, split_latents)
    for name, array in converted(model, kind, split_latents, mxfp4).items():
        if factors and name in factors:
            own = np.array(factors[name], dtype=np.float32)
            writer.add_tensor(name.removesuffix("weight") + "scale", own)
            array = array / own.reshape(-1, *[1] * (array.ndim - 1))
        is_stored = mxfp4 and name.endswith("_exps.weight")
        writer.add_tensor(name, np.ascontiguousarray(array), raw_dtype=T.MXFP4 if is_stored else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def logits(path: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    decoder = load_decoder(resolve_model(str(path)), device=CPU, dtype=dtype)
    return PagedDriver(decoder, block_size=16).run(0, TOKENS, 11).float()


@pytest.mark.parametrize(
    ("case", "split_latents"),
    [
        ("olmo2", True), ("glm4", True), ("phi3", True), ("phi3_longrope", True),
        ("gpt_oss", True), ("deepseek_v2", False), ("deepseek_v2_groups", True),
        ("deepseek_v3", True), ("deepseek_v3", False), ("granite", True), ("granite_moe", True),
        ("cohere", True), ("cohere2", True), ("starcoder2", True), ("stablelm", True), ("stablelm_parallel", True),
        ("phi", True), ("nemotron", True), ("arcee", True), ("olmo", True), ("gemma", True), ("ernie4_5", True),
        ("seed_oss", True), ("lfm2", True), ("lfm2_moe", True),
    ],
)  # fmt: skip
def test_a_file_gives_its_models_spec_and_logits(case: str, split_latents: bool, tmp_path: Path) -> None:
    model = write(tmp_path / "model.gguf", case, split_latents=split_latents)
    assert spec_from_config(resolve_model(str(tmp_path / "model.gguf")).config) == spec_from_config(config_of(model))
    with torch.inference_mode():
        wanted = model(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(logits(tmp_path / "model.gguf"), wanted, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("split_latents", [True, False])
def test_factors_of_latent_projections_are_applied(split_latents: bool, tmp_path: Path) -> None:
    """One per tensor, or one for each of its heads."""
    path, heads = tmp_path / "model.gguf", np.linspace(0.5, 3, 6).tolist()
    parts = {"attn_k_b": heads, "attn_v_b": [0.25]} if split_latents else {"attn_kv_b": [4.0]}
    parts |= {"attn_kv_a_mqa": [2.0], "attn_q_b": [3.0], "attn_output": [0.5], "ffn_down_shexp": [2.0]}
    factors = {f"blk.{layer}.{part}.weight": own for layer in range(3) for part, own in parts.items()}
    model = write(path, "deepseek_v3", split_latents=split_latents, factors=factors)
    with torch.inference_mode():
        wanted = model(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(logits(path), wanted, atol=2e-4, rtol=2e-4)


def test_factors_of_another_number_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, "deepseek_v3", factors={"blk.1.attn_k_b.weight": [1.0, 2.0, 1.0, 2.0, 1.0, 1.0]})
    data = path.read_bytes()
    weights = open_weights(resolve_model(str(path)))
    assert weights.get("model.layers.1.self_attn.kv_b_proj.weight").isfinite().all()
    path.write_bytes(data.replace(b"blk.1.attn_k_b.scale", b"blk.1.attn_q_b.scale"))
    weights = open_weights(resolve_model(str(path)))
    with pytest.raises(ModelError, match=r"attn_q_b.scale' has type F32 and shape \(6,\); it must have one F32 factor"):
        weights.get("model.layers.1.self_attn.q_b_proj.weight")


def test_mxfp4_experts_stay_as_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_weights, "cache_dir", lambda: tmp_path / "cache")
    path = tmp_path / "model.gguf"
    model = write(path, "gpt_oss", mxfp4=True)
    weights = open_weights(resolve_model(str(path)))
    assert isinstance(weights, GgufWeights)
    experts = [name for name in weights.names() if ".experts." in name and name.endswith("weight")]
    assert {weights.stored_format(name) for name in experts} == {"MXFP4"}
    state = model.state_dict()
    for layer in range(3):
        base = f"model.layers.{layer}.mlp.experts."
        for expert in range(5):
            gate, up, down = (weights.get(f"{base}{expert}.{part}_proj.weight") for part in ("gate", "up", "down"))
            state[f"{base}gate_up_proj"][expert] = torch.stack((gate, up), dim=1).flatten(0, 1).t()
            state[f"{base}down_proj"][expert] = down.t()
    with torch.inference_mode():
        wanted = model(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(logits(path), wanted, atol=2e-4, rtol=2e-4)

    rows = torch.from_numpy(weights.stored_rows(experts[0]).copy())
    kept = weight_of_blocks("MXFP4", rows, weights.shape(experts[0])[1], torch.bfloat16)
    assert kept.num_bytes == rows.nbytes == weights.stored_bytes(experts[0])
    assert torch.equal(kept.dequantised(), weights.get(experts[0]))

    wide = StateDictSource({name: weights.get(name, dtype=torch.float32) for name in weights.names()})
    spec = spec_from_config(config_of(model))
    dequantised = load_module.build_decoder(spec, wide, device=CPU, dtype=torch.bfloat16)
    decoder = load_decoder(resolve_model(str(path)), device=CPU, dtype=torch.bfloat16)
    assert decoder.choices["expert_linear"].version.op == "stored_linear"
    found, rounded = (PagedDriver(each, block_size=16).run(0, TOKENS, 11) for each in (decoder, dequantised))
    assert torch.equal(found, rounded)


@pytest.mark.parametrize("case", ["gpt_oss", "deepseek_v3"])
def test_parts_of_tensors_are_those_of_the_whole(case: str, tmp_path: Path) -> None:
    """Biases of experts are rows of one tensor; keys and values of latents come from two."""
    write(tmp_path / "model.gguf", case)
    weights = open_weights(resolve_model(str(tmp_path / "model.gguf")))
    assert isinstance(weights, GgufWeights)
    for name in weights.names():
        cut = Cut(rows=range(2, 5))
        if weights.shape(name)[0] > 5:
            assert torch.equal(weights.part(name, cut), weights.get(name)[2:5]), name
