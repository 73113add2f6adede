"""Translates GGUF metadata into the content of the model's Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from millrace.errors import ModelError
from millrace.sources.encoders.families import instead_of
from millrace.sources.gguf import encoder_config, other_config
from millrace.sources.gguf.common import common, described, has_bias
from millrace.sources.gguf.metadata import Metadata
from millrace.sources.gguf.model import GgufModel
from millrace.sources.gguf.rope import long_rope

GEMMA2_27B_LAYERS, GEMMA3_27B_LAYERS = 46, 62
SMOLLM3_ROPE_INTERVAL = 4
GLM4_ROTARY_SHARE = 0.5
SOFTMAX, SIGMOID = 1, 2
"""Values of `expert_gating_func`."""


def config_from_gguf(model: GgufModel) -> dict[str, Any]:
    """The config of a supported architecture. Raises for unknown architectures and inconsistent metadata."""
    arch = model.metadata.get("general.architecture")
    translate = ARCHITECTURES.get(arch) if isinstance(arch, str) else None
    if translate is None:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(
            f"{model.path} has architecture {arch!r}, which is not supported. Supported GGUF architectures: {known}."
            f"{instead_of(arch)}"
        )
    return translate(Metadata(model, str(arch)))


# --- one short function per architecture ---


def _llama(meta: Metadata) -> dict[str, Any]:
    """Llama, Mistral, SmolLM and Mixtral: experts and sliding windows tell them apart."""
    config = common(meta, "llama", "LlamaForCausalLM")
    config["intermediate_size"] = meta.whole("feed_forward_length")
    config["attention_bias"] = has_bias(meta, "attn_q") or has_bias(meta, "attn_qkv")
    config["mlp_bias"] = has_bias(meta, "ffn_gate")
    window = meta.whole("attention.sliding_window", 0, minimum=0)
    experts = meta.whole("expert_count", 0, minimum=0)
    if experts:
        config |= {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": experts}
        config |= {"num_experts_per_tok": meta.whole("expert_used_count"), "sliding_window": window or None}
    elif window:
        config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}
    return config


def _smollm3(meta: Metadata) -> dict[str, Any]:
    config = common(meta, "smollm3", "SmolLM3ForCausalLM")
    layers = range(1, config["num_hidden_layers"] + 1)
    return config | {
        "intermediate_size": meta.whole("feed_forward_length"),
        "attention_bias": has_bias(meta, "attn_q"),
        "mlp_bias": has_bias(meta, "ffn_gate"),
        "no_rope_layer_interval": SMOLLM3_ROPE_INTERVAL,
        "no_rope_layers": [int(layer % SMOLLM3_ROPE_INTERVAL != 0) for layer in layers],
        "layer_types": ["full_attention" for _ in layers],
        "use_sliding_window": False,
    }


def _qwen2(meta: Metadata) -> dict[str, Any]:
    config = common(meta, "qwen2", "Qwen2ForCausalLM")
    return config | {"intermediate_size": meta.whole("feed_forward_length"), "use_sliding_window": False}


def _qwen3(meta: Metadata) -> dict[str, Any]:
    config = common(meta, "qwen3", "Qwen3ForCausalLM")
    config |= {"attention_bias": has_bias(meta, "attn_q"), "use_sliding_window": False}
    return config | {"intermediate_size": meta.whole("feed_forward_length")}


def _qwen3_moe(meta: Metadata) -> dict[str, Any]:
    config = common(meta, "qwen3_moe", "Qwen3MoeForCausalLM")
    used, dense = meta.whole("expert_used_count"), meta.whole("feed_forward_length", 0, minimum=0)
    per_expert = meta.whole("expert_feed_forward_length", dense // used if dense else None)
    return config | {
        "intermediate_size": dense or per_expert * used,
        "moe_intermediate_size": per_expert,
        "num_experts": meta.whole("expert_count"),
        "num_experts_per_tok": used,
        # GGUF convention: routing weights of the chosen experts sum to one.
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": has_bias(meta, "attn_q"),
        "use_sliding_window": False,
    }


def _gemma2(meta: Metadata) -> dict[str, Any]:
    config = common(meta, "gemma2", "Gemma2ForCausalLM")
    return config | {
        **_gemma_shared(meta, config, GEMMA2_27B_LAYERS),
        **_windows(meta, config["num_hidden_layers"], meta.whole("attention.sliding_window", 4096), period=2),
        "attn_logit_softcapping": meta.number("attn_logit_softcapping", 50.0) or None,
        "final_logit_softcapping": meta.number("final_logit_softcapping", 30.0) or None,
    }


def _gemma3(meta: Metadata) -> dict[str, Any]:
    config = common(meta, "gemma3_text", "Gemma3ForCausalLM")
    window = meta.whole("attention.sliding_window", 0, minimum=0)
    return config | {
        **_gemma_shared(meta, config, GEMMA3_27B_LAYERS),
        **_windows(meta, config["num_hidden_layers"], window, period=6),
        "rope_theta": meta.number("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": meta.number("rope.freq_base_swa", 10_000.0),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": meta.number("final_logit_softcapping", 0.0) or None,
    }


def _gemma_shared(meta: Metadata, config: dict[str, Any], layers_of_27b: int) -> dict[str, Any]:
    """Only the 27B models scale queries by hidden size per head instead of the head size; no key says so."""
    head_dim: int = config["head_dim"]
    is_27b = config["num_hidden_layers"] == layers_of_27b
    return {
        "intermediate_size": meta.whole("feed_forward_length"),
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"] if is_27b else head_dim,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
    }


def _windows(meta: Metadata, num_layers: int, window: int, period: int) -> dict[str, Any]:
    """Layers with a sliding window: a list in the file, or all but every `period`th."""
    pattern = meta.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        if len(pattern) != num_layers:
            raise meta.fail("attention.sliding_window_pattern", f"has {len(pattern)} entries for {num_layers} layers")
        slides = [bool(item) for item in pattern]
    else:
        period = meta.whole("attention.sliding_window_pattern", period, minimum=0)
        slides = [period == 0 or layer % period < period - 1 for layer in range(num_layers)]
    kinds = ["sliding_attention" if window and slide else "full_attention" for slide in slides]
    return {"sliding_window": window or None, "layer_types": kinds}


def _olmo2(meta: Metadata) -> dict[str, Any]:
    if meta.whole("attention.sliding_window", 0, minimum=0):
        raise meta.fail("attention.sliding_window", "is not 0: the model is an OLMo 3, which is not supported")
    config = common(meta, "olmo2", "Olmo2ForCausalLM")
    return config | {
        "intermediate_size": meta.whole("feed_forward_length"),
        "attention_bias": has_bias(meta, "attn_q"),
    }


def _glm4(meta: Metadata) -> dict[str, Any]:
    if meta.get("rope.dimension_sections"):
        raise meta.fail("rope.dimension_sections", "is set: the model is for images, whose order of heads is another")
    config = common(meta, "glm4", "Glm4ForCausalLM", rotary_share=GLM4_ROTARY_SHARE)
    return config | {
        "intermediate_size": meta.whole("feed_forward_length"),
        "attention_bias": has_bias(meta, "attn_q") or has_bias(meta, "attn_qkv"),
        "partial_rotary_factor": GLM4_ROTARY_SHARE,
    }


def _phi3(meta: Metadata) -> dict[str, Any]:
    hidden, heads, context = meta.whole("embedding_length"), meta.whole("attention.head_count"), "context_length"
    head_dim = meta.whole("attention.key_length", hidden // heads)
    share = meta.whole("rope.dimension_count", head_dim) / head_dim
    config = common(meta, "phi3", "Phi3ForCausalLM", rotary_share=share)
    return config | {
        "intermediate_size": meta.whole("feed_forward_length"),
        "partial_rotary_factor": share,
        "original_max_position_embeddings": meta.whole("rope.scaling.original_context_length", meta.whole(context)),
        "rope_scaling": long_rope(meta) or config["rope_scaling"],
        "sliding_window": meta.whole("attention.sliding_window", 0, minimum=0) or None,
    }


def _gpt_oss(meta: Metadata) -> dict[str, Any]:
    config = common(meta, "gpt_oss", "GptOssForCausalLM")
    if config["rope_scaling"] and config["rope_scaling"]["rope_type"] == "yarn":
        # All models of the family have it; no key says so.
        config["rope_scaling"]["truncate"] = False
    return config | {
        **_windows(meta, config["num_hidden_layers"], meta.whole("attention.sliding_window"), period=2),
        "intermediate_size": meta.whole("expert_feed_forward_length"),
        "num_local_experts": meta.whole("expert_count"),
        "num_experts_per_tok": meta.whole("expert_used_count"),
        "attention_bias": has_bias(meta, "attn_q"),
    }


def _deepseek2(meta: Metadata) -> dict[str, Any]:
    """DeepSeek V2 and V3; the function that scores experts tells them apart."""
    rotary_dim = meta.whole("rope.dimension_count")
    is_v3 = meta.whole("expert_gating_func", SOFTMAX) == SIGMOID
    name = "V3" if is_v3 else "V2"
    config = described(meta, f"deepseek_{name.lower()}", f"Deepseek{name}ForCausalLM", rotary_dim)
    used, groups = meta.whole("expert_used_count"), meta.whole("expert_group_count", 1, minimum=0) or 1
    config |= {
        "num_key_value_heads": config["num_attention_heads"],
        "intermediate_size": meta.whole("feed_forward_length"),
        "q_lora_rank": meta.whole("attention.q_lora_rank", 0, minimum=0) or None,
        "kv_lora_rank": meta.whole("attention.kv_lora_rank"),
        # Older files have one pair of keys, for the heads.
        "qk_nope_head_dim": _of_heads(meta, "key_length") - rotary_dim,
        "qk_rope_head_dim": rotary_dim,
        "v_head_dim": _of_heads(meta, "value_length"),
        "first_k_dense_replace": meta.whole("leading_dense_block_count", 0, minimum=0),
        "n_routed_experts": meta.whole("expert_count"),
        "n_shared_experts": meta.whole("expert_shared_count", 0, minimum=0),
        "num_experts_per_tok": used,
        "moe_intermediate_size": meta.whole("expert_feed_forward_length"),
        "routed_scaling_factor": meta.number("expert_weights_scale", 1.0) or 1.0,
        "norm_topk_prob": bool(meta.get("expert_weights_norm")),
        "n_group": groups,
        "topk_group": (meta.whole("expert_group_used_count", 0, minimum=0) or groups) if groups > 1 else 1,
        "attention_bias": has_bias(meta, "attn_kv_a_mqa"),
    }
    if not is_v3:
        config["topk_method"] = "greedy" if groups == 1 else "group_limited_greedy"
    return _with_scaled_scores(meta, config)


def _of_heads(meta: Metadata, key: str) -> int:
    return meta.whole(f"attention.{key}_mla", meta.whole(f"attention.{key}"))


def _with_scaled_scores(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """A tenth of `mscale_all_dim` is in the file, and `mscale` is the same: rotation then scales nothing."""
    multiplier = meta.number("rope.scaling.yarn_log_multiplier", 0.0)
    scaling = config["rope_scaling"]
    if scaling and scaling["rope_type"] == "yarn" and multiplier:
        scaling.pop("attention_factor", None)
        scaling["mscale"] = scaling["mscale_all_dim"] = float(f"{10 * multiplier:.6g}")
    return config


ARCHITECTURES: dict[str, Callable[[Metadata], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "smollm3": _smollm3,
    "phi3": _phi3,
    "olmo2": _olmo2,
    "glm4": _glm4,
    "gpt-oss": _gpt_oss,
    "deepseek2": _deepseek2,
    **other_config.ARCHITECTURES,
    "bert": encoder_config.bert,
    "nomic-bert": encoder_config.nomic_bert,
    "jina-bert-v2": encoder_config.jina_bert,
}
