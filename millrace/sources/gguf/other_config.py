"""Configs of architectures with layer norms, scales, or MLPs without gates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from millrace.sources.gguf.common import common, has_bias
from millrace.sources.gguf.metadata import Metadata

_SCALES = ("logit_scale", "residual_scale", "embedding_scale")


def _partly_rotated(meta: Metadata, model_type: str, architecture: str) -> dict[str, Any]:
    head_dim = meta.whole("embedding_length") // meta.whole("attention.head_count")
    head_dim = meta.whole("attention.key_length", head_dim)
    share = meta.whole("rope.dimension_count", head_dim) / head_dim
    config = common(meta, model_type, architecture, rotary_share=share)
    return config | {"intermediate_size": meta.whole("feed_forward_length"), "partial_rotary_factor": share}


def _granite(meta: Metadata) -> dict[str, Any]:
    config = common(meta, "granite", "GraniteForCausalLM", allowed=_SCALES)
    return config | {
        "intermediate_size": meta.whole("feed_forward_length"),
        "attention_bias": has_bias(meta, "attn_q"),
        "mlp_bias": has_bias(meta, "ffn_gate"),
        "attention_multiplier": meta.number("attention.scale", 1.0),
        "embedding_multiplier": meta.number("embedding_scale", 1.0),
        "residual_multiplier": meta.number("residual_scale", 1.0),
        "logits_scaling": meta.number("logit_scale", 1.0),
    }


def _granite_moe(meta: Metadata) -> dict[str, Any]:
    if meta.whole("expert_shared_feed_forward_length", 0, minimum=0):
        raise meta.fail("expert_shared_feed_forward_length", "is not 0; use the safetensors files of this model")
    return _granite(meta) | {
        "model_type": "granitemoe",
        "architectures": ["GraniteMoeForCausalLM"],
        "num_local_experts": meta.whole("expert_count"),
        "num_experts_per_tok": meta.whole("expert_used_count"),
    }


def _cohere(meta: Metadata) -> dict[str, Any]:
    config = common(meta, "cohere", "CohereForCausalLM", allowed=("logit_scale",))
    return config | {
        "intermediate_size": meta.whole("feed_forward_length"),
        "layer_norm_eps": config["rms_norm_eps"],
        "logit_scale": meta.number("logit_scale"),
        "attention_bias": has_bias(meta, "attn_q"),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in meta.model,
    }


def _cohere2(meta: Metadata) -> dict[str, Any]:
    """Every fourth layer sees everything; no key says so."""
    window = meta.whole("attention.sliding_window")
    own = {"model_type": "cohere2", "architectures": ["Cohere2ForCausalLM"]}
    return _cohere(meta) | own | {"sliding_window": window, "sliding_window_pattern": 4}


def _starcoder2(meta: Metadata) -> dict[str, Any]:
    config = common(meta, "starcoder2", "Starcoder2ForCausalLM")
    return config | {
        "intermediate_size": meta.whole("feed_forward_length"),
        "norm_epsilon": config["rms_norm_eps"],
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": has_bias(meta, "attn_q"),
        "sliding_window": meta.whole("attention.sliding_window", 0, minimum=0) or None,
    }


def _stablelm(meta: Metadata) -> dict[str, Any]:
    config = _partly_rotated(meta, "stablelm", "StableLmForCausalLM")
    return config | {
        "layer_norm_eps": config["rms_norm_eps"],
        "use_qkv_bias": has_bias(meta, "attn_q"),
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in meta.model,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in meta.model,
    }


def _phi2(meta: Metadata) -> dict[str, Any]:
    config = _partly_rotated(meta, "phi", "PhiForCausalLM")
    return config | {"layer_norm_eps": config["rms_norm_eps"], "hidden_act": "gelu_new"}


def _nemotron(meta: Metadata) -> dict[str, Any]:
    config = _partly_rotated(meta, "nemotron", "NemotronForCausalLM")
    biases = {"attention_bias": has_bias(meta, "attn_q"), "mlp_bias": has_bias(meta, "ffn_up")}
    return config | biases | {"norm_eps": config["rms_norm_eps"], "hidden_act": "relu2"}


def _arcee(meta: Metadata) -> dict[str, Any]:
    config = common(meta, "arcee", "ArceeForCausalLM")
    return config | {
        "intermediate_size": meta.whole("feed_forward_length"),
        "attention_bias": has_bias(meta, "attn_q"),
        "mlp_bias": has_bias(meta, "ffn_up"),
        "hidden_act": "relu2",
    }


def _olmo(meta: Metadata) -> dict[str, Any]:
    config = common(meta, "olmo", "OlmoForCausalLM", allowed=("attention.clamp_kqv",))
    return config | {
        "intermediate_size": meta.whole("feed_forward_length"),
        "attention_bias": has_bias(meta, "attn_q"),
        "clip_qkv": meta.number("attention.clamp_kqv", 0.0) or None,
    }


def _gemma(meta: Metadata) -> dict[str, Any]:
    return common(meta, "gemma", "GemmaForCausalLM") | {
        "intermediate_size": meta.whole("feed_forward_length"),
        "hidden_act": "gelu_pytorch_tanh",
    }


def _ernie(meta: Metadata) -> dict[str, Any]:
    return common(meta, "ernie4_5", "Ernie4_5ForCausalLM") | {
        "intermediate_size": meta.whole("feed_forward_length"),
        "use_bias": has_bias(meta, "attn_q"),
    }


def _seed_oss(meta: Metadata) -> dict[str, Any]:
    return common(meta, "seed_oss", "SeedOssForCausalLM") | {
        "intermediate_size": meta.whole("feed_forward_length"),
        "attention_bias": has_bias(meta, "attn_q"),
        "attention_out_bias": has_bias(meta, "attn_output"),
        "mlp_bias": has_bias(meta, "ffn_up"),
    }


def _lfm2(meta: Metadata) -> dict[str, Any]:
    """Layers without KV heads are convolutions."""
    kv_heads = meta.get("attention.head_count_kv")
    if not isinstance(kv_heads, list) or not any(kv_heads):
        raise meta.fail("attention.head_count_kv", f"is {kv_heads!r}; it must say which layers have attention")
    config = common(meta, "lfm2", "Lfm2ForCausalLM", num_kv_heads=max(kv_heads))
    return config | {
        "norm_eps": config["rms_norm_eps"],
        "intermediate_size": meta.whole("feed_forward_length"),
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["full_attention" if count else "conv" for count in kv_heads],
        "conv_L_cache": meta.whole("shortconv.l_cache"),
        "conv_bias": has_bias(meta, "shortconv.conv"),
    }


def _lfm2_moe(meta: Metadata) -> dict[str, Any]:
    return _lfm2(meta) | {
        "model_type": "lfm2_moe",
        "architectures": ["Lfm2MoeForCausalLM"],
        "num_dense_layers": meta.whole("leading_dense_block_count", 0, minimum=0),
        "num_experts": meta.whole("expert_count"),
        "num_experts_per_tok": meta.whole("expert_used_count"),
        "moe_intermediate_size": meta.whole("expert_feed_forward_length"),
        "use_expert_bias": True,
        "norm_topk_prob": True,
    }


ARCHITECTURES: dict[str, Callable[[Metadata], dict[str, Any]]] = {
    "granite": _granite,
    "granitemoe": _granite_moe,
    "command-r": _cohere,
    "cohere2": _cohere2,
    "starcoder2": _starcoder2,
    "stablelm": _stablelm,
    "phi2": _phi2,
    "nemotron": _nemotron,
    "arcee": _arcee,
    "olmo": _olmo,
    "gemma": _gemma,
    "ernie4_5": _ernie,
    "seed_oss": _seed_oss,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2_moe,
}
