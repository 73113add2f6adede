"""Families with other mixers than attention: recurrent layers, latent attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millrace.models.spec.expert_families import GRANITE_EXPERTS, GRANITE_SHARED
from millrace.models.spec.family import Family, WeightNames, no_windows
from millrace.models.spec.hybrids import granite_hybrid, qwen3_next
from millrace.models.spec.latent import deepseek_v2, deepseek_v3

_LATENT_DEFAULTS: Mapping[str, Any] = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_LATENT_NAMES = WeightNames(shared_expert="mlp.shared_experts", router_bias="mlp.gate.e_score_correction_bias")

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
)
