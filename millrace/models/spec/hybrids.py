"""Families whose layers are partly recurrent: how their configs become ModelSpec fields."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from millrace.models.spec.config_reader import ConfigReader
from millrace.models.spec.family import attention_bias, experts_of
from millrace.models.spec.model_spec import LayerSpec, MixerKind, MoeSpec, RecurrentSpec
from millrace.ops.base.routing import Routing

_KINDS = {"linear_attention": True, "mamba": True, "conv": True, "full_attention": False, "attention": False}
"""By name in `layer_types`: True for recurrent layers."""


def qwen3_5(c: ConfigReader) -> dict[str, Any]:
    """As Qwen3-Next, with plain projections, and without experts in some models."""
    if not c.flag("attn_output_gate", True):
        raise c.fail("attn_output_gate", "is false, which is not supported")
    return qwen3_next(c, by_group=False)


def qwen3_next(c: ConfigReader, by_group: bool = True) -> dict[str, Any]:
    """Gated delta nets, gated attention in every fourth layer, experts with a shared one."""
    num_layers, experts = c.whole("num_hidden_layers"), c.whole("num_experts", 512, minimum=0)
    interval = c.whole("full_attention_interval", 4)
    recurs = _recurrent_layers(c, [(layer + 1) % interval != 0 for layer in range(num_layers)])
    step, dense = c.whole("decoder_sparse_step", 1), set(c.whole_list("mlp_only_layers"))
    layers = tuple(
        LayerSpec(
            rope=None if recurs[layer] else 0,
            is_moe=experts > 0 and layer not in dense and (layer + 1) % step == 0,
            mixer="gated_delta" if recurs[layer] else "gated_attention",
        )
        for layer in range(num_layers)
    )
    bias = c.flag("attention_bias")
    return {
        "norm_offset": 1.0,
        "qk_norm": True,
        "qkv_bias": bias,
        "out_bias": bias,
        "layers": layers,
        "moe": _qwen_experts(c, experts) if any(layer.is_moe for layer in layers) else None,
        "recurrent": _check_recurrent(
            c,
            RecurrentSpec(
                heads=c.whole("linear_num_value_heads", 32),
                groups=c.whole("linear_num_key_heads", 16),
                key_dim=c.whole("linear_key_head_dim", 128),
                value_dim=c.whole("linear_value_head_dim", 128),
                conv_width=c.whole("linear_conv_kernel_dim", 4, minimum=2),
                norm_eps=c.positive("rms_norm_eps", 1e-6),
                by_group=by_group,
            ),
            "linear_num_key_heads",
        ),
    }


def _qwen_experts(c: ConfigReader, experts: int) -> MoeSpec:
    top_k = c.whole("num_experts_per_tok", 10)
    if top_k > experts:
        raise c.fail("num_experts_per_tok", f"is {top_k}, more than the {experts} experts")
    shared = c.whole("shared_expert_intermediate_size", 512)
    return MoeSpec(experts, top_k, c.whole("moe_intermediate_size", 512), c.flag("norm_topk_prob", True), shared, True)


def granite_hybrid(c: ConfigReader) -> dict[str, Any]:
    """Mamba2, a few attention layers, an MLP that every token takes, beside experts if there are any.

    The family scales what is added to the residual. Here the residual is divided by that instead: the norms that read
    it do not see the difference, except in their epsilon."""
    num_layers, scale = c.whole("num_hidden_layers"), c.positive("residual_multiplier", 1.0)
    shared, experts = c.whole("shared_intermediate_size", 1024), c.whole("num_local_experts", 8, minimum=0)
    moe = experts_of(c, experts, c.whole("intermediate_size"), renormalise=True) if experts else None
    recurs = _recurrent_layers(c, [True] * num_layers)
    bias = c.flag("attention_bias")
    rope = 0 if c.get("position_embedding_type") == "rope" else None
    kinds: Iterator[tuple[MixerKind, int | None]] = (("mamba2", None) if own else ("attention", rope) for own in recurs)
    layers = tuple(LayerSpec(rope=rotation, is_moe=experts > 0, mixer=mixer) for mixer, rotation in kinds)
    return {
        "inner_size": shared,
        "moe": None if moe is None else replace(moe, shared_size=shared),
        "qkv_bias": bias,
        "out_bias": bias,
        "attention_scale": c.positive("attention_multiplier", 1.0),
        "embedding_scale": c.positive("embedding_multiplier", 1.0) / scale,
        "hidden_scale": 1.0 / c.positive("logits_scaling", 1.0),
        "norm_eps": c.positive("rms_norm_eps", 1e-6) / scale**2,
        "layers": layers,
        "recurrent": _mamba2(c),
    }


def bamba(c: ConfigReader) -> dict[str, Any]:
    """Mamba2 and a few attention layers, with dense MLPs."""
    attends = c.whole_list("attn_layer_indices")
    recurs = _recurrent_layers(c, [layer not in attends for layer in range(c.whole("num_hidden_layers"))])
    layers = tuple(LayerSpec(mixer="mamba2", rope=None) if own else LayerSpec() for own in recurs)
    return {**attention_bias(c), "mlp_bias": c.flag("mlp_bias"), "layers": layers, "recurrent": _mamba2(c)}


def lfm2(c: ConfigReader) -> dict[str, Any]:
    """Short convolutions and a few attention layers; experts in all layers but the first, if there are any."""
    num_layers, experts = c.whole("num_hidden_layers"), c.whole("num_experts", 0, minimum=0)
    attends = c.whole_list("full_attn_idxs") if c.has("full_attn_idxs") else list(range(num_layers))
    recurs = _recurrent_layers(c, [layer not in attends for layer in range(num_layers)])
    first = c.whole("num_dense_layers", 2, minimum=0) if experts else num_layers
    bias, channels = c.flag("conv_bias"), c.whole("hidden_size")
    kinds: Iterator[tuple[MixerKind, int | None]] = (
        ("short_conv", None) if own else ("attention", 0) for own in recurs
    )
    recurrent = RecurrentSpec(
        heads=channels,
        groups=channels,
        key_dim=0,
        value_dim=1,
        conv_width=c.whole("conv_L_cache", 3, minimum=2),
        norm_eps=0.0,
        conv_bias=bias,
        linear_bias=bias,
    )
    return {
        "inner_size": c.whole("intermediate_size") if experts else _lfm2_inner(c),
        "norm_eps": c.positive("norm_eps", 1e-5),
        "qk_norm": True,
        "tied_head": c.flag("tie_embedding", c.flag("tie_word_embeddings")),
        "moe": _lfm2_experts(c, experts) if first < num_layers else None,
        "layers": tuple(
            LayerSpec(rope=rope, is_moe=at >= first, mixer=mixer) for at, (mixer, rope) in enumerate(kinds)
        ),
        "recurrent": recurrent if any(recurs) else None,
    }


def _lfm2_inner(c: ConfigReader) -> int:
    inner = c.whole("block_ff_dim", c.whole("intermediate_size"))
    if not c.flag("block_auto_adjust_ff_dim", True):
        return inner
    inner, unit = int(c.positive("block_ffn_dim_multiplier", 1.0) * (2 * inner // 3)), c.whole("block_multiple_of", 256)
    return -(-inner // unit) * unit


def _lfm2_experts(c: ConfigReader, experts: int) -> MoeSpec:
    if not c.flag("use_expert_bias", True):
        raise c.fail("use_expert_bias", "is false, which is not supported")
    moe = experts_of(c, experts, c.whole("moe_intermediate_size"), c.flag("norm_topk_prob", True))
    return replace(moe, routing=Routing("sigmoid", scale=c.positive("routed_scaling_factor", 1.0)))


def _mamba2(c: ConfigReader) -> RecurrentSpec:
    heads, value_dim = c.whole("mamba_n_heads", 128), c.get("mamba_d_head")
    if value_dim in (None, "auto"):
        value_dim = c.whole("mamba_expand", 2) * c.whole("hidden_size") // heads
    recurrent = RecurrentSpec(
        heads=heads,
        groups=c.whole("mamba_n_groups", 1),
        key_dim=c.whole("mamba_d_state", 256),
        value_dim=int(value_dim),
        conv_width=c.whole("mamba_d_conv", 4, minimum=2),
        norm_eps=c.positive("rms_norm_eps", 1e-6),
        conv_bias=c.flag("mamba_conv_bias", True),
        linear_bias=c.flag("mamba_proj_bias"),
        time_step_limit=_time_step_limit(c),
    )
    return _check_recurrent(c, recurrent, "mamba_n_groups")


def _time_step_limit(c: ConfigReader) -> tuple[float, float]:
    """An infinite limit is written as {"__float__": "Infinity"}, which JSON has no number for."""
    given = c.get("time_step_limit") or (0.0, math.inf)
    try:
        low, high = (float(one["__float__"]) if isinstance(one, dict) else float(one) for one in given)
    except (KeyError, TypeError, ValueError) as error:
        raise c.fail("time_step_limit", f"is {given!r}; it must be two numbers") from error
    return low, high


def _recurrent_layers(c: ConfigReader, default: list[bool]) -> list[bool]:
    """Which layers are recurrent."""
    kinds = c.get("layer_types")
    if kinds is None:
        recurs = default
    elif not isinstance(kinds, list) or len(kinds) != len(default) or not set(kinds) <= set(_KINDS):
        raise c.fail("layer_types", f"is {kinds!r}; it must be a list of {len(default)} of {', '.join(_KINDS)}")
    else:
        recurs = [_KINDS[kind] for kind in kinds]
    if all(recurs):
        raise c.fail("layer_types", "has no attention layer; models with recurrent layers alone are not supported")
    return recurs


def _check_recurrent(c: ConfigReader, recurrent: RecurrentSpec, key: str) -> RecurrentSpec:
    if (name := c.get("hidden_act") or "silu") not in ("silu", "swish"):
        raise c.fail("hidden_act", f"is {name!r}; convolutions of recurrent layers support silu")
    if recurrent.heads % recurrent.groups:
        raise c.fail(key, f"is {recurrent.groups}, which does not divide {recurrent.heads} heads")
    return recurrent
