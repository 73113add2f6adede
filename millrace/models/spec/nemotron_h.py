"""Nemotron-H: blocks that are Mamba2, attention or an MLP alone. Here a layer is a mixer and the MLP after it, if one
follows."""

from __future__ import annotations

from typing import Any

from millrace.models.spec.config_reader import ConfigReader
from millrace.models.spec.model_spec import LayerSpec, MixerKind, RecurrentSpec

_BLOCKS = {
    "M": "mamba2",
    "mamba": "mamba2",
    "linear_attention": "mamba2",
    "*": "attention",
    "attention": "attention",
    "full_attention": "attention",
    "-": "mlp",
    "mlp": "mlp",
    "E": "moe",
    "moe": "moe",
}
_MIXERS: dict[str, MixerKind] = {"mamba2": "mamba2", "attention": "attention"}


def nemotron_h(c: ConfigReader) -> dict[str, Any]:
    if c.flag("attention_bias"):
        raise c.fail("attention_bias", "is true, which is not supported in models of this family")
    if c.get("mlp_hidden_act") not in (None, "relu2"):
        raise c.fail("mlp_hidden_act", f"is {c.get('mlp_hidden_act')!r}; relu2 is supported")
    heads, groups, bias = c.whole("mamba_num_heads", 128), c.whole("n_groups", 8), c.flag("use_bias")
    if heads % groups:
        raise c.fail("n_groups", f"is {groups}, which does not divide {heads} heads")
    blocks = _blocks(c)
    follows = [*blocks[1:], ""]
    layers = tuple(
        LayerSpec(rope=None, mixer=_MIXERS[kind], has_mlp=after == "mlp")
        for kind, after in zip(blocks, follows, strict=True)
        if kind != "mlp"
    )
    if "attention" not in blocks:
        raise c.fail("layers_block_type", "has no attention; models with recurrent layers alone are not supported")
    eps = c.positive("layer_norm_epsilon", 1e-5)
    recurrent = RecurrentSpec(
        heads=heads,
        groups=groups,
        key_dim=c.whole("ssm_state_size", 128),
        value_dim=c.whole("mamba_head_dim", 64),
        conv_width=c.whole("conv_kernel", 4, minimum=2),
        norm_eps=eps,
        conv_bias=c.flag("use_conv_bias", True),
        linear_bias=bias,
        norm_by_group=True,
        time_step_limit=(c.number("time_step_min", 0.001), float("inf")),
    )
    return {
        "norm_eps": eps,
        "gated_mlp": False,
        "activation": "relu2",
        "mlp_bias": c.flag("mlp_bias"),
        "layers": layers,
        "recurrent": recurrent if "mamba2" in blocks else None,
    }


def block_names(c: ConfigReader) -> tuple[tuple[str, str], ...]:
    """The tensors of each block, in the layer that it belongs to."""
    found: list[tuple[str, str]] = []
    layer = -1
    for block, kind in enumerate(_blocks(c)):
        layer += kind != "mlp"
        norm = "post_attention_layernorm" if kind == "mlp" else "input_layernorm"
        module = {"mlp": "mlp", "attention": "self_attn", "mamba2": "mamba"}[kind]
        prefix, own = rf"^(?:backbone|model)\.layers\.{block}\.", f"=model.layers.{layer}."
        found += [(rf"{prefix}norm\.", f"{own}{norm}."), (rf"{prefix}mixer\.", f"{own}{module}.")]
    # The mark keeps a name from being replaced twice.
    return (*found, (r"^=", ""))


def _blocks(c: ConfigReader) -> list[str]:
    """mamba2, attention or mlp."""
    given = c.get("hybrid_override_pattern") or c.get("layers_block_type") or c.get("layer_types")
    if not given or not all(kind in _BLOCKS for kind in given):
        raise c.fail("layers_block_type", f"is {given!r}; it must be a list of mamba, attention and mlp")
    blocks = [_BLOCKS[kind] for kind in given]
    if "moe" in blocks:
        raise c.fail("layers_block_type", "has experts, which are not supported in models of this family so far")
    if blocks[0] == "mlp" or any(pair == ("mlp", "mlp") for pair in zip(blocks, blocks[1:], strict=False)):
        raise c.fail("layers_block_type", "has an mlp that follows no mixer, which is not supported")
    return blocks
