"""Families with experts beside ordinary attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from millrace.models.spec.config_reader import ConfigReader
from millrace.models.spec.dense_families import granite
from millrace.models.spec.family import (
    Family,
    WeightNames,
    Windows,
    attention_bias,
    by_type,
    experts_of,
    no_windows,
    qwen_windows,
)
from millrace.models.spec.latent import sigmoid_routing, sparse_layers
from millrace.models.spec.model_spec import LayerSpec
from millrace.models.spec.rope import ROPE_KEYS, read_rope
from millrace.ops.base.routing import Routing

_SHARED = WeightNames(shared_expert="mlp.shared_experts", router_bias="mlp.gate.e_score_correction_bias")


def _qwen2_moe(c: ConfigReader) -> dict[str, Any]:
    num_layers, experts = c.whole("num_hidden_layers"), c.whole("num_experts", 60)
    step, dense = c.whole("decoder_sparse_step", 1), set(c.whole_list("mlp_only_layers"))
    windows = qwen_windows(c, num_layers)
    moe = experts_of(c, experts, c.whole("moe_intermediate_size"), c.flag("norm_topk_prob"))
    is_sparse = [layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)]
    shared = c.whole("shared_expert_intermediate_size")
    return {
        "qkv_bias": c.flag("qkv_bias", True),
        "moe": replace(moe, shared_size=shared, gates_shared=True) if any(is_sparse) else None,
        "layers": tuple(LayerSpec(windows[layer], is_moe=is_sparse[layer]) for layer in range(num_layers)),
    }


def _olmoe(c: ConfigReader) -> dict[str, Any]:
    return {
        **attention_bias(c),
        "qk_norm": True,
        "qk_norm_span": "projection",
        "qkv_clip": c.optional_positive("clip_qkv"),
        "moe": experts_of(c, c.whole("num_experts"), c.whole("intermediate_size"), c.flag("norm_topk_prob")),
        "layers": tuple(LayerSpec(is_moe=True) for _ in range(c.whole("num_hidden_layers"))),
    }


def _dots_windows(c: ConfigReader, num_layers: int) -> Windows:
    """Without a list of layers, those from `max_window_layers` on slide, if there is a window at all."""
    if c.optional_whole("sliding_window") is None:
        return [None] * num_layers
    first = c.whole("max_window_layers", 62, minimum=0)
    return by_type(c, num_layers, lambda layer: layer >= first)


def _dots1(c: ConfigReader) -> dict[str, Any]:
    windows = _dots_windows(c, c.whole("num_hidden_layers"))
    routing = sigmoid_routing(c, 1.0)
    sparse = sparse_layers(c, routing, c.flag("norm_topk_prob"), mixer="attention", windows=windows)
    return {**attention_bias(c), "qk_norm": True, **sparse}


def _glm4_moe(c: ConfigReader) -> dict[str, Any]:
    sparse = sparse_layers(c, sigmoid_routing(c, 1.0), c.flag("norm_topk_prob", True), mixer="attention")
    return {"qkv_bias": c.flag("attention_bias"), "qk_norm": c.flag("use_qk_norm"), **sparse}


GRANITE_SHARED = WeightNames(
    mlp_gate_up=("shared_mlp.input_linear",),
    mlp_down="shared_mlp.output_linear",
    shared_expert="shared_mlp",
    shared_gate_up=("input_linear",),
    shared_down="output_linear",
)
GRANITE_EXPERTS = (
    (r"block_sparse_moe\.(input_linear\.weight|experts\.gate_up_proj)$", "mlp.experts.gate_up_proj"),
    (r"block_sparse_moe\.(output_linear\.weight|experts\.down_proj)$", "mlp.experts.down_proj"),
    (r"block_sparse_moe\.router\.(layer\.)?", "mlp.gate."),
)
"""The experts of a layer are two tensors."""


def _granite_moe(c: ConfigReader) -> dict[str, Any]:
    """With `shared_intermediate_size` every token takes an MLP beside its experts."""
    moe = experts_of(c, c.whole("num_local_experts", 8), c.whole("intermediate_size"), renormalise=True)
    return {
        **granite(c),
        "moe": replace(moe, shared_size=c.whole("shared_intermediate_size", 0, minimum=0)),
        "layers": tuple(LayerSpec(is_moe=True) for _ in range(c.whole("num_hidden_layers"))),
    }


def _minimax_m2(c: ConfigReader) -> dict[str, Any]:
    """Older configs say how many dimensions are rotated."""
    experts, head_dim = c.whole("num_local_experts", c.whole("num_experts", 256)), c.whole("head_dim")
    entries = {key: c.get(key) for key in ROPE_KEYS}
    if c.has("rotary_dim"):
        entries["partial_rotary_factor"] = c.whole("rotary_dim") / head_dim
    moe = experts_of(c, experts, c.whole("intermediate_size"), renormalise=True)
    return {
        "qk_norm": c.flag("use_qk_norm", True),
        "qk_norm_span": "projection",
        "ropes": (read_rope(entries, head_dim, 5_000_000.0, "full_attention"),),
        "moe": replace(moe, routing=Routing("sigmoid")),
        "layers": tuple(LayerSpec(is_moe=True) for _ in range(c.whole("num_hidden_layers"))),
    }


EXPERT_FAMILIES: tuple[Family, ...] = (
    Family(
        name="minimax_m2",
        model_types=("minimax_m2",),
        architectures=("MiniMaxM2ForCausalLM",),
        traits=_minimax_m2,
        windows=no_windows,
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 196608,
            "num_experts_per_tok": 8,
        },
        theta=5_000_000.0,
        names=_SHARED,
        renames=(
            (r"\.block_sparse_moe\.", ".mlp."),
            (r"\.mlp\.e_score_correction_bias$", ".mlp.gate.e_score_correction_bias"),
            (r"(\.experts\.\d+\.)w1\.", r"\1gate_proj."),
            (r"(\.experts\.\d+\.)w3\.", r"\1up_proj."),
            (r"(\.experts\.\d+\.)w2\.", r"\1down_proj."),
        ),
    ),
    Family(
        name="qwen2_moe",
        model_types=("qwen2_moe",),
        architectures=("Qwen2MoeForCausalLM",),
        traits=_qwen2_moe,
        windows=qwen_windows,
        defaults={
            "num_key_value_heads": 16,
            "max_position_embeddings": 32768,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
    ),
    Family(
        name="olmoe",
        model_types=("olmoe",),
        architectures=("OlmoeForCausalLM",),
        traits=_olmoe,
        windows=no_windows,
        defaults={
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "num_experts": 64,
            "num_experts_per_tok": 8,
        },
    ),
    Family(
        name="granite_moe",
        model_types=("granitemoe", "granitemoeshared"),
        architectures=("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"),
        traits=_granite_moe,
        windows=no_windows,
        defaults={"max_position_embeddings": 2048, "num_experts_per_tok": 2},
        names=GRANITE_SHARED,
        renames=GRANITE_EXPERTS,
    ),
    Family(
        name="dots1",
        model_types=("dots1",),
        architectures=("Dots1ForCausalLM",),
        traits=_dots1,
        windows=_dots_windows,
        defaults={
            "num_key_value_heads": 32,
            "max_position_embeddings": 2048,
            "sliding_window": 4096,
            "first_k_dense_replace": 0,
            "moe_intermediate_size": 1408,
            "n_group": 1,
            "topk_group": 1,
        },
        names=_SHARED,
    ),
    Family(
        name="glm4_moe",
        model_types=("glm4_moe",),
        architectures=("Glm4MoeForCausalLM",),
        traits=_glm4_moe,
        windows=no_windows,
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 1408,
            "n_group": 1,
            "topk_group": 1,
        },
        names=_SHARED,
    ),
)
