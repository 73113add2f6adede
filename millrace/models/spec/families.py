"""The model families: for each, how its config becomes a ModelSpec, and the names of its weights.

To add a family, see docs/contributing/model-family.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from millrace.errors import ModelError
from millrace.models.spec import gpt_oss
from millrace.models.spec.config_reader import ConfigReader
from millrace.models.spec.dense_families import DENSE_FAMILIES
from millrace.models.spec.expert_families import EXPERT_FAMILIES
from millrace.models.spec.family import (
    Family,
    WeightNames,
    Windows,
    attention_bias,
    by_type,
    experts_of,
    no_windows,
    qwen_moe_windows,
    qwen_windows,
    uniform_windows,
)
from millrace.models.spec.layer_norm_families import LAYER_NORM_FAMILIES
from millrace.models.spec.mixer_families import MIXER_FAMILIES
from millrace.models.spec.model_spec import LayerSpec, ModelSpec, RopeSpec
from millrace.models.spec.rope import ROPE_KEYS, read_rope
from millrace.ops.base.activation_kind import Activation
from millrace.sources.encoders.families import instead_of
from millrace.sources.hf_config import is_multimodal

MAX_LAYERS = 1024
"""A config with more layers is treated as damaged."""
NO_LIMIT = 1 << 62
MAX_EXPERTS = 4096
"""The router's GPU kernel keeps the logits of a token's experts in the registers of one warp."""

_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}
_WITHOUT_GATES: Mapping[str, Activation] = {**_ACTIVATIONS, "relu": "relu", "relu2": "relu2"}


# --- the traits of each family ---


def _llama(c: ConfigReader) -> dict[str, Any]:
    return {**attention_bias(c), "mlp_bias": c.flag("mlp_bias")}


def _smollm3(c: ConfigReader) -> dict[str, Any]:
    num_layers = c.whole("num_hidden_layers")
    rotates = c.whole_list("no_rope_layers")
    if not c.has("no_rope_layers"):
        interval = c.whole("no_rope_layer_interval", 4)
        rotates = [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    if len(rotates) < num_layers:
        raise c.fail("no_rope_layers", f"has {len(rotates)} entries for {num_layers} layers")
    windows = _smollm3_windows(c, num_layers)
    layers = [LayerSpec(windows[layer], 0 if rotates[layer] else None) for layer in range(num_layers)]
    return {**_llama(c), "layers": tuple(layers)}


def _smollm3_windows(c: ConfigReader, num_layers: int) -> Windows:
    if not (c.flag("use_sliding_window") and c.has("sliding_window")):
        return [None] * num_layers
    rotates = c.whole_list("no_rope_layers") or [int((layer + 1) % 4 != 0) for layer in range(num_layers)]
    return by_type(c, num_layers, lambda layer: not rotates[layer])


def _gemma2(c: ConfigReader) -> dict[str, Any]:
    _refuse_bidirectional(c)
    return {
        **attention_bias(c),
        "norm_offset": 1.0,
        "sandwich_norms": True,
        "attention_scale": c.positive("query_pre_attn_scalar") ** -0.5,
        "attention_softcap": c.optional_positive("attn_logit_softcapping"),
        "logit_softcap": c.optional_positive("final_logit_softcapping"),
        "embedding_scale": float(c.whole("hidden_size")) ** 0.5,
    }


def _gemma3(c: ConfigReader) -> dict[str, Any]:
    windows = _gemma3_windows(c, c.whole("num_hidden_layers"))
    return {
        **_gemma2(c),
        "qk_norm": True,
        "layers": tuple(LayerSpec(window, rope=0 if window is None else 1) for window in windows),
        "ropes": _gemma3_ropes(c),
    }


def _gemma3_windows(c: ConfigReader, num_layers: int) -> Windows:
    period = c.whole("sliding_window_pattern", 6)
    return by_type(c, num_layers, lambda layer: (layer + 1) % period != 0)


def _gemma3_ropes(c: ConfigReader) -> tuple[RopeSpec, RopeSpec]:
    """The rope of global layers, then that of sliding layers, which `rope_scaling` does not affect."""
    head_dim = c.whole("head_dim")
    entries = {key: c.get(key) for key in ("rope_parameters", "max_position_embeddings", "partial_rotary_factor")}
    scaled = {**entries, "rope_theta": c.get("rope_theta"), "rope_scaling": c.get("rope_scaling")}
    local = {**entries, "rope_theta": c.get("rope_local_base_freq")}
    return (
        read_rope(scaled, head_dim, 1_000_000.0, "full_attention"),
        read_rope(local, head_dim, 10_000.0, "sliding_attention"),
    )


def _refuse_bidirectional(c: ConfigReader) -> None:
    if c.flag("use_bidirectional_attention"):
        problem = "is true: the model is for embeddings and cannot generate text"
        raise c.fail(
            "use_bidirectional_attention", f"{problem}. To embed, use Qwen3-Embedding or nomic-embed-text-v1.5"
        )


def _mixtral(c: ConfigReader) -> dict[str, Any]:
    experts = c.whole("num_local_experts", c.whole("num_experts", 8))
    layers = tuple(LayerSpec(window, is_moe=True) for window in uniform_windows(c, c.whole("num_hidden_layers")))
    return {"moe": experts_of(c, experts, c.whole("intermediate_size"), renormalise=True), "layers": layers}


def _qwen3_moe(c: ConfigReader) -> dict[str, Any]:
    num_layers = c.whole("num_hidden_layers")
    experts = c.whole("num_experts", c.whole("num_local_experts", 128), minimum=0)
    step, dense = c.whole("decoder_sparse_step", 1), set(c.whole_list("mlp_only_layers"))
    windows = qwen_moe_windows(c, num_layers)
    layers = tuple(
        LayerSpec(windows[layer], is_moe=experts > 0 and layer not in dense and (layer + 1) % step == 0)
        for layer in range(num_layers)
    )
    renormalise = c.flag("norm_topk_prob", c.get("model_type") == "qwen3_vl_moe_text")
    moe = experts_of(c, experts, c.whole("moe_intermediate_size"), renormalise) if experts else None
    return {**attention_bias(c), "qk_norm": True, "moe": moe, "layers": layers}


def _gpt_oss_windows(c: ConfigReader, num_layers: int) -> Windows:
    return by_type(c, num_layers, lambda layer: layer % 2 == 0)


def _glm(c: ConfigReader) -> dict[str, Any]:
    return {"qkv_bias": c.flag("attention_bias", True), "rotates_neighbours": True}


_GLM_DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-07,
    "partial_rotary_factor": 0.5,
}

_GEMMA_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_GEMMA_NAMES = WeightNames(
    attention_out_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
)

FAMILIES: tuple[Family, ...] = (
    Family(
        name="llama",
        model_types=("llama",),
        architectures=("LlamaForCausalLM",),
        traits=_llama,
        windows=no_windows,
        defaults={"max_position_embeddings": 2048},
    ),
    Family(
        name="mistral",
        model_types=("mistral",),
        architectures=("MistralForCausalLM",),
        traits=lambda c: {},
        windows=uniform_windows,
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    ),
    Family(
        name="qwen2",
        model_types=("qwen2", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"),
        architectures=("Qwen2ForCausalLM",),
        traits=lambda c: {"qkv_bias": True},
        windows=qwen_windows,
        defaults={"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096},
    ),
    Family(
        name="qwen3",
        model_types=("qwen3", "qwen3_vl_text"),
        architectures=("Qwen3ForCausalLM",),
        traits=lambda c: {**attention_bias(c), "qk_norm": True},
        windows=qwen_windows,
        defaults={
            "num_key_value_heads": 32,
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
        },
    ),
    Family(
        name="olmo2",
        model_types=("olmo2",),
        architectures=("Olmo2ForCausalLM",),
        traits=lambda c: {
            **attention_bias(c),
            "qk_norm": True,
            "qk_norm_span": "projection",
            "input_norms": False,
            "sandwich_norms": True,
        },
        windows=no_windows,
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
        names=WeightNames(attention_out_norm="post_attention_layernorm", mlp_out_norm="post_feedforward_layernorm"),
    ),
    Family(
        name="glm4",
        model_types=("glm4",),
        architectures=("Glm4ForCausalLM",),
        traits=lambda c: {**_glm(c), "sandwich_norms": True},
        windows=no_windows,
        defaults=_GLM_DEFAULTS,
        names=WeightNames(
            attention_out_norm="post_self_attn_layernorm",
            mlp_out_norm="post_mlp_layernorm",
            mlp_gate_up=("mlp.gate_up_proj",),
        ),
    ),
    Family(
        name="glm",
        model_types=("glm",),
        architectures=("GlmForCausalLM",),
        traits=_glm,
        windows=no_windows,
        defaults=_GLM_DEFAULTS,
        names=WeightNames(mlp_gate_up=("mlp.gate_up_proj",)),
    ),
    Family(
        name="smollm3",
        model_types=("smollm3",),
        architectures=("SmolLM3ForCausalLM",),
        traits=_smollm3,
        windows=_smollm3_windows,
        defaults={"num_key_value_heads": 4, "max_position_embeddings": 32768, "tie_word_embeddings": True},
        theta=2_000_000.0,
    ),
    Family(
        name="gemma2",
        model_types=("gemma2",),
        architectures=("Gemma2ForCausalLM",),
        traits=_gemma2,
        windows=lambda c, num_layers: by_type(c, num_layers, lambda layer: layer % 2 == 0),
        defaults={
            **_GEMMA_DEFAULTS,
            "vocab_size": 256000,
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        names=_GEMMA_NAMES,
    ),
    Family(
        name="gemma3",
        model_types=("gemma3_text", "gemma3"),
        architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        traits=_gemma3,
        windows=_gemma3_windows,
        defaults={**_GEMMA_DEFAULTS, "vocab_size": 262208, "max_position_embeddings": 131072},
        names=_GEMMA_NAMES,
    ),
    Family(
        name="mixtral",
        model_types=("mixtral",),
        architectures=("MixtralForCausalLM",),
        traits=_mixtral,
        windows=uniform_windows,
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "num_experts_per_tok": 2,
        },
        theta=1_000_000.0,
        names=WeightNames(
            router="block_sparse_moe.gate",
            expert_gate="block_sparse_moe.experts.{e}.w1",
            expert_up="block_sparse_moe.experts.{e}.w3",
            expert_down="block_sparse_moe.experts.{e}.w2",
        ),
    ),
    Family(
        name="qwen3_moe",
        model_types=("qwen3_moe", "qwen3_vl_moe_text"),
        architectures=("Qwen3MoeForCausalLM",),
        traits=_qwen3_moe,
        windows=qwen_moe_windows,
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
    ),
    Family(
        name="gpt_oss",
        model_types=("gpt_oss",),
        architectures=("GptOssForCausalLM",),
        traits=lambda c: gpt_oss.gpt_oss(c, _gpt_oss_windows(c, c.whole("num_hidden_layers"))),
        windows=_gpt_oss_windows,
        defaults=gpt_oss.DEFAULTS,
        theta=150_000.0,
        names=WeightNames(router="mlp.router"),
    ),
    *DENSE_FAMILIES,
    *LAYER_NORM_FAMILIES,
    *EXPERT_FAMILIES,
    *MIXER_FAMILIES,
)


# --- from a config to its spec ---


def family_named(name: str) -> Family:
    return next(family for family in FAMILIES if family.name == name)


def family_of(config: Mapping[str, Any]) -> Family | None:
    """The family by `architectures`, or by `model_type` if the config names no architecture, or one of which the
    language model is a part."""
    architectures = config.get("architectures") or []
    for family in FAMILIES:
        if any(name in family.architectures for name in architectures):
            return family
    if architectures and not is_multimodal(config):
        return None
    kind = config.get("model_type")
    return next((family for family in FAMILIES if kind in family.model_types), None)


def find_family(config: Mapping[str, Any]) -> Family:
    family = family_of(config)
    if family is not None:
        return family
    architectures, kind = config.get("architectures") or [], config.get("model_type")
    named = ", ".join(map(str, architectures)) or f"model_type {kind!r}"
    supported = ", ".join(name for family in FAMILIES for name in family.architectures)
    instead = instead_of(architectures[0] if architectures else kind)
    close = _close_names(architectures, kind)
    raise ModelError(
        f"The model's architecture is {named}, which is not supported.{close} Supported: {supported}.{instead}"
    )


def _close_names(architectures: Sequence[object], kind: object) -> str:
    """A sentence that names architectures spelled alike; "" if there are none."""
    known = {name.lower(): family.architectures[0] for family in FAMILIES for name in family.architectures}
    known |= {name: family.architectures[0] for family in FAMILIES for name in family.model_types}
    wanted = [str(name).lower() for name in (*architectures, kind) if name]
    found = [close for name in wanted for close in get_close_matches(name, known, n=3, cutoff=0.75)]
    names = list(dict.fromkeys(known[name] for name in found))
    return f" Names like it: {', '.join(names)}." if names else ""


def renames_of(config: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    family = family_of(config)
    if family is None:
        return ()
    own = () if family.own_renames is None else family.own_renames(ConfigReader(config, family.defaults))
    return (*own, *family.renames)


def renamed(name: str, renames: tuple[tuple[str, str], ...]) -> str:
    """The name that the layout has for a tensor of a checkpoint."""
    for pattern, own in renames:
        name = re.sub(pattern, own, name)
    return name


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """The spec of a config.json; a nested `text_config` takes precedence. Raises a ModelError that names a bad key."""
    text = config.get("text_config")
    if isinstance(text, Mapping):
        config = {**config, **{key: value for key, value in text.items() if key != "architectures"}}
    family = find_family(config)
    c = ConfigReader(config, family.defaults)
    if c.whole("num_hidden_layers") > MAX_LAYERS:
        raise c.fail("num_hidden_layers", f"is {c.get('num_hidden_layers')}, above the limit of {MAX_LAYERS}")
    traits = family.traits(c)
    fields = {**_common(c, family, _ACTIVATIONS if traits.get("gated_mlp", True) else _WITHOUT_GATES), **traits}
    if "layers" not in fields:
        windows = family.windows(c, c.whole("num_hidden_layers"))
        fields["layers"] = tuple(LayerSpec(window) for window in windows)
    spec = ModelSpec(family=family.name, max_context=_max_context(c, fields["ropes"]), **fields)
    if spec.moe is not None and spec.moe.num_experts > MAX_EXPERTS:
        raise ModelError(
            f"The model has {spec.moe.num_experts} experts per layer; routing supports at most {MAX_EXPERTS}. Use a"
            " model with fewer experts."
        )
    _check_heads(c, spec)
    return spec


def _common(c: ConfigReader, family: Family, activations: Mapping[str, Activation]) -> dict[str, Any]:
    hidden_size, num_heads = c.whole("hidden_size"), c.whole("num_attention_heads")
    head_dim = c.whole("head_dim", hidden_size // num_heads)
    entries = {key: c.get(key) for key in ROPE_KEYS}
    return {
        "vocab_size": c.whole("vocab_size"),
        "hidden_size": hidden_size,
        "inner_size": c.whole("intermediate_size"),
        "num_heads": num_heads,
        "num_kv_heads": c.whole("num_key_value_heads", num_heads),
        "head_dim": head_dim,
        "ropes": (read_rope(entries, head_dim, family.theta, "full_attention"),),
        "norm_eps": c.positive("rms_norm_eps", 1e-6),
        "attention_scale": head_dim**-0.5,
        "activation": _activation(c, activations),
        "tied_head": c.flag("tie_word_embeddings"),
    }


def _activation(c: ConfigReader, known: Mapping[str, Activation]) -> Activation:
    key = "hidden_activation" if c.has("hidden_activation") else "hidden_act"
    name = c.get(key) or "silu"
    if name not in known:
        raise c.fail(key, f"is {name!r}; supported: {', '.join(known)}")
    return known[name]


def _max_context(c: ConfigReader, ropes: tuple[RopeSpec, ...]) -> int:
    """YaRN extends the trained context; some configs state only the trained one. Where the frequencies of longer texts
    are others, the trained one is the limit."""
    extended = [int(rope.original_context * rope.factor) for rope in ropes if rope.kind == "yarn"]
    trained = [rope.original_context for rope in ropes if rope.kind == "divisors" and rope.original_context]
    return min(max(c.whole("max_position_embeddings"), *extended, 1), *trained, NO_LIMIT)


def _check_heads(c: ConfigReader, spec: ModelSpec) -> None:
    if spec.num_heads % spec.num_kv_heads:
        raise c.fail("num_key_value_heads", f"is {spec.num_kv_heads}, which does not divide {spec.num_heads} heads")
    if not c.has("head_dim") and spec.hidden_size % spec.num_heads:
        raise c.fail(
            "num_attention_heads", f"is {spec.num_heads}, which does not divide hidden_size {spec.hidden_size}"
        )
