"""Families with latent attention: how their configs become ModelSpec fields."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from millrace.models.spec.config_reader import ConfigReader
from millrace.models.spec.model_spec import LatentSpec, LayerSpec, MixerKind, MoeSpec
from millrace.models.spec.rope import ROPE_KEYS, read_rope
from millrace.ops.base.routing import Routing


def deepseek_v2(c: ConfigReader) -> dict[str, Any]:
    """DeepSeek V2: softmax over all experts, of which some groups may be chosen first."""
    method = c.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise c.fail("topk_method", f"is {method!r}; greedy and group_limited_greedy are supported")
    if c.flag("norm_topk_prob"):
        raise c.fail("norm_topk_prob", "is true, which is not supported in models of this family")
    is_grouped = method == "group_limited_greedy"
    routing = Routing(
        num_groups=c.whole("n_group") if is_grouped else 1,
        top_groups=c.whole("topk_group") if is_grouped else 1,
        scale=c.positive("routed_scaling_factor", 1.0),
    )
    return {**_latent_attention(c, pairs_neighbours=True), **sparse_layers(c, routing, renormalise=False)}


def deepseek_v3(c: ConfigReader) -> dict[str, Any]:
    """DeepSeek V3: a sigmoid for each expert, with a bias for the choice; the best groups first."""
    if c.get("scoring_func") not in (None, "sigmoid"):
        raise c.fail("scoring_func", f"is {c.get('scoring_func')!r}; sigmoid is supported")
    attention = _latent_attention(c, pairs_neighbours=c.flag("rope_interleave", True))
    return {**attention, **sparse_layers(c, sigmoid_routing(c, 2.5), renormalise=c.flag("norm_topk_prob", True))}


def glm4_moe_lite(c: ConfigReader) -> dict[str, Any]:
    """As DeepSeek V3; newer configs name the kind of each layer's MLP."""
    kinds, first = c.get("mlp_layer_types"), c.whole("first_k_dense_replace", minimum=0)
    num_layers = c.whole("num_hidden_layers")
    if kinds is not None and kinds != ["dense"] * first + ["sparse"] * (num_layers - first):
        raise c.fail("mlp_layer_types", f"is {kinds!r}; only the first {first} may be dense, and must be")
    return deepseek_v3(c)


def sigmoid_routing(c: ConfigReader, scale: float) -> Routing:
    """`scale`: the family's default."""
    return Routing(
        "sigmoid",
        num_groups=c.whole("n_group"),
        top_groups=c.whole("topk_group"),
        scale=c.positive("routed_scaling_factor", scale),
    )


def _latent_attention(c: ConfigReader, pairs_neighbours: bool) -> dict[str, Any]:
    latent = LatentSpec(
        rank=c.whole("kv_lora_rank"),
        rope_dim=c.whole("qk_rope_head_dim"),
        key_dim=c.whole("qk_nope_head_dim"),
        value_dim=c.whole("v_head_dim"),
        query_rank=c.optional_whole("q_lora_rank"),
        pairs_neighbours=pairs_neighbours,
    )
    bias = c.flag("attention_bias")
    if bias and latent.query_rank is None:
        raise c.fail("attention_bias", "is true, which is supported only with a q_lora_rank")
    entries = {key: c.get(key) for key in ROPE_KEYS}
    return {
        "num_kv_heads": 1,
        "head_dim": latent.width,
        "ropes": (read_rope(entries, latent.rope_dim, 10_000.0, "full_attention"),),
        "attention_scale": (latent.key_dim + latent.rope_dim) ** -0.5 * _yarn_scale(c) ** 2,
        "qkv_bias": bias,
        "out_bias": bias,
        "latent": latent,
    }


def _yarn_scale(c: ConfigReader) -> float:
    """By what a longer context scales queries, and likewise keys, beside the factor of their rotation."""
    entries = {**(c.get("rope_scaling") or {}), **(c.get("rope_parameters") or {})}
    rope = ConfigReader(entries)
    all_dim = rope.number("mscale_all_dim", 0.0)
    if (rope.get("rope_type") or rope.get("type") or "default") == "default" or not all_dim:
        return 1.0
    factor = rope.positive("factor")
    return 0.1 * all_dim * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def sparse_layers(
    c: ConfigReader,
    routing: Routing,
    renormalise: bool,
    mixer: MixerKind = "latent_attention",
    windows: Sequence[int | None] = (),
) -> dict[str, Any]:
    """Dense MLPs in the first layers, experts and a shared MLP in the others."""
    num_layers, experts, top_k = (
        c.whole("num_hidden_layers"),
        c.whole("n_routed_experts"),
        c.whole("num_experts_per_tok"),
    )
    if c.whole("moe_layer_freq", 1) != 1:
        raise c.fail("moe_layer_freq", f"is {c.get('moe_layer_freq')}; 1 is supported")
    if experts % routing.num_groups or (routing.num_groups > 1 and experts // routing.num_groups < 2):
        raise c.fail("n_group", f"is {routing.num_groups}, which does not divide {experts} experts into groups")
    if not top_k <= routing.top_groups * (experts // routing.num_groups) <= experts:
        raise c.fail("topk_group", f"is {routing.top_groups}: {top_k} experts are not in so many groups")
    inner, first = c.whole("moe_intermediate_size"), c.whole("first_k_dense_replace", minimum=0)
    moe = MoeSpec(
        experts,
        top_k,
        inner,
        renormalise,
        shared_size=inner * c.whole("n_shared_experts", 0, minimum=0),
        routing=routing,
    )
    windows = windows or [None] * num_layers
    layers = tuple(LayerSpec(windows[layer], is_moe=layer >= first, mixer=mixer) for layer in range(num_layers))
    return {"layers": layers, "moe": moe if first < num_layers else None}
