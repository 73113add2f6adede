"""Families without experts that differ from Llama in a few traits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millrace.models.spec.config_reader import ConfigReader
from millrace.models.spec.family import (
    Family,
    WeightNames,
    Windows,
    attention_bias,
    by_type,
    no_windows,
    uniform_windows,
)
from millrace.models.spec.model_spec import LayerSpec
from millrace.models.spec.rope import ROPE_KEYS, read_rope

_AFTER_BRANCHES = WeightNames(attention_out_norm="post_attention_layernorm", mlp_out_norm="post_feedforward_layernorm")
"""Of families that normalise what a branch gives, not what it reads."""


def _seed_oss(c: ConfigReader) -> dict[str, Any]:
    return {
        "qkv_bias": c.flag("attention_bias", True),
        "out_bias": c.flag("attention_out_bias"),
        "mlp_bias": c.flag("mlp_bias"),
    }


def _ernie(c: ConfigReader) -> dict[str, Any]:
    bias = c.flag("use_bias")
    return {"qkv_bias": bias, "out_bias": bias, "mlp_bias": bias, "rotates_neighbours": True}


def _exaone4_windows(c: ConfigReader, num_layers: int) -> Windows:
    """The pattern is a period, or letters that repeat; the last layer sees everything if it has letters."""
    if c.optional_whole("sliding_window") is None:
        return [None] * num_layers
    pattern = c.get("sliding_window_pattern")
    if isinstance(pattern, str):
        if not pattern or set(pattern) - set("LG"):
            raise c.fail("sliding_window_pattern", f"is {pattern!r}; it must consist of the letters L and G")
        last = num_layers - 1
        return by_type(c, num_layers, lambda layer: layer != last and pattern[layer % len(pattern)] == "L")
    period = c.whole("sliding_window_pattern", 4)
    return by_type(c, num_layers, lambda layer: (layer + 1) % period != 0)


def _exaone4(c: ConfigReader) -> dict[str, Any]:
    """If any layer has a window, those without do not rotate."""
    windows = _exaone4_windows(c, c.whole("num_hidden_layers"))
    has_windows = c.optional_whole("sliding_window") is not None
    return {
        "qk_norm": True,
        "input_norms": False,
        "sandwich_norms": True,
        "layers": tuple(LayerSpec(window, None if has_windows and window is None else 0) for window in windows),
    }


def _olmo3_windows(c: ConfigReader, num_layers: int) -> Windows:
    return by_type(c, num_layers, lambda layer: (layer + 1) % 4 != 0)


def _olmo3(c: ConfigReader) -> dict[str, Any]:
    """A longer context scales the RoPE of the layers without a window alone."""
    windows = _olmo3_windows(c, c.whole("num_hidden_layers"))
    head_dim = c.whole("head_dim", c.whole("hidden_size") // c.whole("num_attention_heads"))
    entries = {key: c.get(key) for key in ROPE_KEYS}
    parameters = entries["rope_parameters"] or {}
    is_nested = any(isinstance(value, Mapping) for value in parameters.values())
    plain = {**entries, "rope_scaling": None, "rope_parameters": parameters if is_nested else None}
    theta = 500_000.0 if is_nested else parameters.get("rope_theta", 500_000.0)
    return {
        **attention_bias(c),
        "qk_norm": True,
        "qk_norm_span": "projection",
        "input_norms": False,
        "sandwich_norms": True,
        "layers": tuple(LayerSpec(window, rope=0 if window is None else 1) for window in windows),
        "ropes": (
            read_rope(entries, head_dim, 500_000.0, "full_attention"),
            read_rope(plain, head_dim, theta, "sliding_attention"),
        ),
    }


def granite(c: ConfigReader) -> dict[str, Any]:
    """The family scales what is added to the residual. Here the residual is divided by that instead: the norms that
    read it do not see the difference, except in their epsilon."""
    scale = c.positive("residual_multiplier", 1.0)
    return {
        **attention_bias(c),
        "mlp_bias": c.flag("mlp_bias"),
        "attention_scale": c.positive("attention_multiplier", 1.0),
        "embedding_scale": c.positive("embedding_multiplier", 1.0) / scale,
        "hidden_scale": 1.0 / c.positive("logits_scaling", 1.0),
        "norm_eps": c.positive("rms_norm_eps", 1e-6) / scale**2,
    }


def _gemma(c: ConfigReader) -> dict[str, Any]:
    """Published configs call the activation by the name of another one; models of this family were all trained with
    this one."""
    if c.flag("use_bidirectional_attention"):
        raise c.fail("use_bidirectional_attention", "is true: the model is for embeddings and cannot generate text")
    if not (name := str(c.get("hidden_activation") or c.get("hidden_act") or "gelu")).startswith("gelu"):
        raise c.fail("hidden_act", f"is {name!r}; this family supports gelu")
    return {
        **attention_bias(c),
        "activation": "gelu_tanh",
        "norm_offset": 1.0,
        "embedding_scale": float(c.whole("hidden_size")) ** 0.5,
    }


def _cwm_windows(c: ConfigReader, num_layers: int) -> Windows:
    return by_type(c, num_layers, lambda layer: layer % 4 != 0)


def _hunyuan(c: ConfigReader) -> dict[str, Any]:
    return {**attention_bias(c), "qk_norm": True, "qk_norm_after_rope": True}


DENSE_FAMILIES: tuple[Family, ...] = (
    Family(
        name="hunyuan",
        model_types=("hunyuan_v1_dense",),
        architectures=("HunYuanDenseV1ForCausalLM",),
        traits=_hunyuan,
        windows=no_windows,
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
        renames=((r"\.query_layernorm\.", ".q_norm."), (r"\.key_layernorm\.", ".k_norm.")),
    ),
    Family(
        name="phi3",
        model_types=("phi3",),
        architectures=("Phi3ForCausalLM",),
        traits=lambda c: {},
        windows=uniform_windows,
        defaults={
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
        names=WeightNames(mlp_gate_up=("mlp.gate_up_proj",), qkv=("qkv_proj",)),
    ),
    Family(
        name="seed_oss",
        model_types=("seed_oss",),
        architectures=("SeedOssForCausalLM",),
        traits=_seed_oss,
        windows=no_windows,
        defaults={"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288},
    ),
    Family(
        name="ernie4_5",
        model_types=("ernie4_5",),
        architectures=("Ernie4_5ForCausalLM",),
        traits=_ernie,
        windows=no_windows,
        defaults={
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        },
        theta=500_000.0,
    ),
    Family(
        name="exaone4",
        model_types=("exaone4",),
        architectures=("Exaone4ForCausalLM",),
        traits=_exaone4,
        windows=_exaone4_windows,
        defaults={"num_key_value_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
        names=_AFTER_BRANCHES,
    ),
    Family(
        name="olmo3",
        model_types=("olmo3",),
        architectures=("Olmo3ForCausalLM",),
        traits=_olmo3,
        windows=_olmo3_windows,
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "sliding_window": 4096},
        theta=500_000.0,
        names=_AFTER_BRANCHES,
    ),
    Family(
        name="granite",
        model_types=("granite",),
        architectures=("GraniteForCausalLM",),
        traits=granite,
        windows=no_windows,
        defaults={"max_position_embeddings": 2048},
    ),
    Family(
        name="gemma",
        model_types=("gemma",),
        architectures=("GemmaForCausalLM",),
        traits=_gemma,
        windows=no_windows,
        defaults={
            "num_key_value_heads": 16,
            "head_dim": 256,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        },
    ),
    Family(
        name="cwm",
        model_types=("cwm",),
        architectures=("CwmForCausalLM",),
        traits=lambda c: {"mlp_bias": c.flag("mlp_bias")},
        windows=_cwm_windows,
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "sliding_window": 8192,
        },
        theta=1_000_000.0,
    ),
    Family(
        name="ministral",
        model_types=("ministral",),
        architectures=("MinistralForCausalLM",),
        traits=lambda c: {},
        windows=uniform_windows,
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    ),
)
