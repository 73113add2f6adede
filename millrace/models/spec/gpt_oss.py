"""gpt-oss: attention sinks, windows in every second layer, experts with biases and a clamped activation."""

from __future__ import annotations

from typing import Any

from millrace.models.spec.config_reader import ConfigReader
from millrace.models.spec.model_spec import LayerSpec, MoeSpec
from millrace.ops.base.activation_kind import ClampedSwiglu

DEFAULTS: dict[str, Any] = {
    "vocab_size": 201088,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "num_experts_per_tok": 4,
}


def gpt_oss(c: ConfigReader, windows: list[int | None]) -> dict[str, Any]:
    experts, top_k, bias = c.whole("num_local_experts"), c.whole("num_experts_per_tok"), c.flag("attention_bias")
    if top_k > experts:
        raise c.fail("num_experts_per_tok", f"is {top_k}, more than the {experts} experts")
    clamp = ClampedSwiglu(slope=c.positive("swiglu_alpha", 1.702), limit=c.positive("swiglu_limit", 7.0))
    return {
        "qkv_bias": bias,
        "out_bias": bias,
        "attention_sinks": True,
        "layers": tuple(LayerSpec(window, is_moe=True) for window in windows),
        "moe": MoeSpec(experts, top_k, c.whole("intermediate_size"), renormalise=True, has_bias=True, clamp=clamp),
    }
