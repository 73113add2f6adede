"""Families with layer norms, MLPs beside attention, or MLPs without gates."""

from __future__ import annotations

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


def _layer_norms(c: ConfigReader, eps: str, *, bias: bool = True) -> dict[str, Any]:
    return {"norm_kind": "layer", "norm_bias": bias, "norm_eps": c.positive(eps, 1e-5)}


def _refuse(c: ConfigReader, flag: str, problem: str) -> None:
    if c.flag(flag):
        raise c.fail(flag, f"is true; {problem}")


def _cohere(c: ConfigReader) -> dict[str, Any]:
    _refuse(c, "use_qk_norm", "norms with weights for each head (Command R+) are not supported so far")
    return {
        **attention_bias(c),
        **_layer_norms(c, "layer_norm_eps", bias=False),
        "parallel_mlp": True,
        "one_norm": True,
        "rotates_neighbours": True,
        "hidden_scale": c.positive("logit_scale", 0.0625),
    }


def _cohere2_windows(c: ConfigReader, num_layers: int) -> Windows:
    period = c.whole("sliding_window_pattern", 4)
    return by_type(c, num_layers, lambda layer: (layer + 1) % period != 0)


def _cohere2(c: ConfigReader) -> dict[str, Any]:
    """Layers without a window do not rotate."""
    windows = _cohere2_windows(c, c.whole("num_hidden_layers"))
    return {**_cohere(c), "layers": tuple(LayerSpec(window, None if window is None else 0) for window in windows)}


def _starcoder2(c: ConfigReader) -> dict[str, Any]:
    bias = c.flag("use_bias", True)
    biases = {"qkv_bias": bias, "out_bias": bias, "mlp_bias": bias}
    return {**_layer_norms(c, "norm_epsilon"), **biases, "gated_mlp": False}


def _gpt_neox(c: ConfigReader) -> dict[str, Any]:
    bias, head_dim = c.flag("attention_bias", True), c.whole("hidden_size") // c.whole("num_attention_heads")
    entries = {key: c.get(key) for key in ROPE_KEYS}
    entries["partial_rotary_factor"] = entries["partial_rotary_factor"] or c.positive("rotary_pct", 0.25)
    entries["rope_theta"] = entries["rope_theta"] or c.positive("rotary_emb_base", 10_000.0)
    return {
        **_layer_norms(c, "layer_norm_eps"),
        "num_kv_heads": c.whole("num_attention_heads"),
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": True,
        "gated_mlp": False,
        "qkv_by_group": True,
        "parallel_mlp": c.flag("use_parallel_residual", True),
        "ropes": (read_rope(entries, head_dim, 10_000.0, "full_attention"),),
    }


def _phi(c: ConfigReader) -> dict[str, Any]:
    _refuse(c, "qk_layernorm", "layer norms of queries and keys are not supported so far")
    _refuse(c, "tie_word_embeddings", "a head with biases that shares the embedding's matrix is not supported")
    return {
        **_layer_norms(c, "layer_norm_eps"),
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "head_bias": True,
        "gated_mlp": False,
        "parallel_mlp": True,
        "one_norm": True,
    }


def _stablelm(c: ConfigReader) -> dict[str, Any]:
    _refuse(c, "qk_layernorm", "layer norms of queries and keys (StableLM 2 12B) are not supported so far")
    is_parallel = c.flag("use_parallel_residual")
    return {
        **_layer_norms(c, "layer_norm_eps"),
        "qkv_bias": c.flag("use_qkv_bias"),
        "parallel_mlp": is_parallel,
        "one_norm": is_parallel,
    }


def _nemotron(c: ConfigReader) -> dict[str, Any]:
    return {**_arcee(c), **_layer_norms(c, "norm_eps"), "norm_offset": 1.0}


def _arcee(c: ConfigReader) -> dict[str, Any]:
    return {**attention_bias(c), "mlp_bias": c.flag("mlp_bias"), "gated_mlp": False}


def _olmo(c: ConfigReader) -> dict[str, Any]:
    return {
        **attention_bias(c),
        "norm_kind": "layer",
        "norm_weight": False,
        "norm_eps": 1e-5,
        "qkv_clip": c.optional_positive("clip_qkv"),
    }


_COHERE_DEFAULTS = {"max_position_embeddings": 8192, "tie_word_embeddings": True}

LAYER_NORM_FAMILIES: tuple[Family, ...] = (
    Family(
        name="cohere",
        model_types=("cohere",),
        architectures=("CohereForCausalLM",),
        traits=_cohere,
        windows=no_windows,
        defaults=_COHERE_DEFAULTS,
    ),
    Family(
        name="cohere2",
        model_types=("cohere2",),
        architectures=("Cohere2ForCausalLM",),
        traits=_cohere2,
        windows=_cohere2_windows,
        defaults={**_COHERE_DEFAULTS, "sliding_window": 4096},
    ),
    Family(
        name="starcoder2",
        model_types=("starcoder2",),
        architectures=("Starcoder2ForCausalLM",),
        traits=_starcoder2,
        windows=uniform_windows,
        defaults={
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
        },
        renames=((r"\.mlp\.c_fc\.", ".mlp.up_proj."), (r"\.mlp\.c_proj\.", ".mlp.down_proj.")),
    ),
    Family(
        name="gpt_neox",
        model_types=("gpt_neox",),
        architectures=("GPTNeoXForCausalLM",),
        traits=_gpt_neox,
        windows=no_windows,
        defaults={"max_position_embeddings": 2048, "hidden_act": "gelu"},
        names=WeightNames(qkv=("qkv_proj",)),
        renames=(
            (r"^gpt_neox\.embed_in\.", "model.embed_tokens."),
            (r"^gpt_neox\.final_layer_norm\.", "model.norm."),
            (r"^gpt_neox\.", "model."),
            (r"^embed_out\.", "lm_head."),
            (r"\.attention\.query_key_value\.", ".self_attn.qkv_proj."),
            (r"\.attention\.dense\.", ".self_attn.o_proj."),
            (r"\.mlp\.dense_h_to_4h\.", ".mlp.up_proj."),
            (r"\.mlp\.dense_4h_to_h\.", ".mlp.down_proj."),
        ),
    ),
    Family(
        name="phi",
        model_types=("phi",),
        architectures=("PhiForCausalLM",),
        traits=_phi,
        windows=no_windows,
        defaults={"max_position_embeddings": 2048, "hidden_act": "gelu_new", "partial_rotary_factor": 0.5},
        renames=(
            (r"^model\.final_layernorm\.", "model.norm."),
            (r"\.self_attn\.dense\.", ".self_attn.o_proj."),
            (r"\.mlp\.fc1\.", ".mlp.up_proj."),
            (r"\.mlp\.fc2\.", ".mlp.down_proj."),
        ),
    ),
    Family(
        name="stablelm",
        model_types=("stablelm",),
        architectures=("StableLmForCausalLM",),
        traits=_stablelm,
        windows=no_windows,
        defaults={"num_key_value_heads": 32, "max_position_embeddings": 4096, "partial_rotary_factor": 0.25},
    ),
    Family(
        name="nemotron",
        model_types=("nemotron",),
        architectures=("NemotronForCausalLM",),
        traits=_nemotron,
        windows=no_windows,
        defaults={"max_position_embeddings": 4096, "hidden_act": "relu2", "partial_rotary_factor": 0.5},
    ),
    Family(
        name="arcee",
        model_types=("arcee",),
        architectures=("ArceeForCausalLM",),
        traits=_arcee,
        windows=no_windows,
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "relu2"},
    ),
    Family(
        name="olmo",
        model_types=("olmo",),
        architectures=("OlmoForCausalLM",),
        traits=_olmo,
        windows=no_windows,
        defaults={"max_position_embeddings": 2048},
    ),
)
