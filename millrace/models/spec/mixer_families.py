"""Families with other mixers than attention: recurrent layers, latent attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millrace.models.spec.expert_families import GRANITE_EXPERTS, GRANITE_SHARED
from millrace.models.spec.family import Family, WeightNames, no_windows
from millrace.models.spec.hybrids import bamba, granite_hybrid, lfm2, qwen3_5, qwen3_next
from millrace.models.spec.latent import deepseek_v2, deepseek_v3, glm4_moe_lite
from millrace.models.spec.nemotron_h import block_names, nemotron_h

_LATENT_DEFAULTS: Mapping[str, Any] = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_LATENT_NAMES = WeightNames(shared_expert="mlp.shared_experts", router_bias="mlp.gate.e_score_correction_bias")

_LFM2_RENAMES = (
    (r"^model\.embedding_norm\.", "model.norm."),
    (r"\.operator_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
    (r"\.self_attn\.([qk])_layernorm\.", r".self_attn.\1_norm."),
    (r"\.feed_forward\.expert_bias$", ".mlp.gate.e_score_correction_bias"),
    (r"\.feed_forward\.", ".mlp."),
    (r"(\.mlp\.(?:experts\.\d+\.)?)w1\.", r"\1gate_proj."),
    (r"(\.mlp\.(?:experts\.\d+\.)?)w3\.", r"\1up_proj."),
    (r"(\.mlp\.(?:experts\.\d+\.)?)w2\.", r"\1down_proj."),
)

MIXER_FAMILIES: tuple[Family, ...] = (
    Family(
        name="qwen3_next",
        model_types=("qwen3_next",),
        architectures=("Qwen3NextForCausalLM",),
        traits=qwen3_next,
        windows=no_windows,
        defaults={
            "num_key_value_heads": 2,
            "head_dim": 256,
            "intermediate_size": 5632,
            "max_position_embeddings": 32768,
            "partial_rotary_factor": 0.25,
        },
    ),
    Family(
        name="granite_hybrid",
        model_types=("granitemoehybrid",),
        architectures=("GraniteMoeHybridForCausalLM",),
        traits=granite_hybrid,
        windows=no_windows,
        defaults={"max_position_embeddings": 2048, "num_experts_per_tok": 2},
        names=GRANITE_SHARED,
        renames=GRANITE_EXPERTS,
    ),
    Family(
        name="deepseek_v2",
        model_types=("deepseek_v2",),
        architectures=("DeepseekV2ForCausalLM",),
        traits=deepseek_v2,
        windows=no_windows,
        defaults={
            **_LATENT_DEFAULTS,
            "max_position_embeddings": 2048,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "first_k_dense_replace": 0,
            "moe_intermediate_size": 1407,
        },
        names=_LATENT_NAMES,
    ),
    Family(
        name="deepseek_v3",
        model_types=("deepseek_v3",),
        architectures=("DeepseekV3ForCausalLM",),
        traits=deepseek_v3,
        windows=no_windows,
        defaults={
            **_LATENT_DEFAULTS,
            "max_position_embeddings": 4096,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "first_k_dense_replace": 3,
            "moe_intermediate_size": 2048,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
        },
        names=_LATENT_NAMES,
    ),
    Family(
        name="bamba",
        model_types=("bamba",),
        architectures=("BambaForCausalLM",),
        traits=bamba,
        windows=no_windows,
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
        },
        renames=(
            (r"^model\.final_layernorm\.", "model.norm."),
            (r"\.pre_ff_layernorm\.", ".post_attention_layernorm."),
            (r"\.feed_forward\.", ".mlp."),
        ),
    ),
    Family(
        name="lfm2",
        model_types=("lfm2", "lfm2_moe"),
        architectures=("Lfm2ForCausalLM", "Lfm2MoeForCausalLM"),
        traits=lfm2,
        windows=no_windows,
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 128000,
            "intermediate_size": 12288,
            "num_experts_per_tok": 4,
            "tie_word_embeddings": True,
        },
        theta=1_000_000.0,
        names=WeightNames(router_bias="mlp.gate.e_score_correction_bias"),
        renames=_LFM2_RENAMES,
    ),
    Family(
        name="qwen3_5",
        model_types=("qwen3_5_text", "qwen3_5_moe_text"),
        architectures=("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
        traits=qwen3_5,
        windows=no_windows,
        defaults={
            "num_key_value_heads": 2,
            "head_dim": 256,
            "intermediate_size": 12288,
            "num_experts": 0,
            "num_experts_per_tok": 8,
            "max_position_embeddings": 32768,
            "partial_rotary_factor": 0.25,
        },
    ),
    Family(
        name="nemotron_h",
        model_types=("nemotron_h",),
        architectures=("NemotronHForCausalLM",),
        traits=nemotron_h,
        windows=no_windows,
        defaults={
            "num_hidden_layers": 1,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 4096,
        },
        own_renames=block_names,
        renames=(
            (r"^(?:backbone|model)\.embeddings\.", "model.embed_tokens."),
            (r"^(?:backbone|model)\.norm_f\.", "model.norm."),
        ),
    ),
    Family(
        name="glm4_moe_lite",
        model_types=("glm4_moe_lite",),
        architectures=("Glm4MoeLiteForCausalLM",),
        traits=glm4_moe_lite,
        windows=no_windows,
        defaults={
            **_LATENT_DEFAULTS,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "max_position_embeddings": 202752,
            "rms_norm_eps": 1e-5,
            "n_routed_experts": 64,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 1536,
            "routed_scaling_factor": 1.8,
            "num_experts_per_tok": 4,
            "n_group": 1,
            "topk_group": 1,
        },
        names=_LATENT_NAMES,
    ),
)
