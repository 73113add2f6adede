"""What a family is, and what several families share: windows, biases, experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from millrace.models.spec.config_reader import ConfigReader
from millrace.models.spec.model_spec import MoeSpec

Windows = list[int | None]


@dataclass(frozen=True, slots=True)
class WeightNames:
    """Names of modules under `model.layers.<i>.` that differ between families; `{e}` is the expert index."""

    input_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    attention_out_norm: str = ""
    mlp_out_norm: str = ""
    router: str = "mlp.gate"
    router_bias: str = ""
    expert_gate: str = "mlp.experts.{e}.gate_proj"
    expert_up: str = "mlp.experts.{e}.up_proj"
    expert_down: str = "mlp.experts.{e}.down_proj"
    shared_expert: str = "mlp.shared_expert"
    shared_gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    """Under `shared_expert`. One name: both in one tensor."""
    shared_down: str = "down_proj"
    mlp_gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """One name: both in one tensor."""
    mlp_down: str = "mlp.down_proj"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    """Under `self_attn.`. One name: all in one tensor, queries first."""


@dataclass(frozen=True, slots=True)
class Family:
    name: str
    model_types: tuple[str, ...]
    architectures: tuple[str, ...]
    traits: Callable[[ConfigReader], dict[str, Any]]
    """ModelSpec fields in which this family differs from a plain Llama."""
    windows: Callable[[ConfigReader, int], Windows]
    """The attention window of each layer; called with the number of layers."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of the family's original implementation for keys missing in config.json."""
    theta: float = 10_000.0
    names: WeightNames = WeightNames()
    renames: tuple[tuple[str, str], ...] = ()
    """Regular expressions over the names of a checkpoint's tensors, each with what replaces it, applied in order: for
    modules that `names` has no field for."""
    own_renames: Callable[[ConfigReader], tuple[tuple[str, str], ...]] | None = None
    """More of them, before those, that depend on the config."""


def no_windows(c: ConfigReader, num_layers: int) -> Windows:
    return [None] * num_layers


def uniform_windows(c: ConfigReader, num_layers: int) -> Windows:
    """One window for all layers, unless the config lists the sliding layers."""
    window = c.optional_whole("sliding_window")
    return by_type(c, num_layers, lambda layer: window is not None)


def qwen_windows(c: ConfigReader, num_layers: int) -> Windows:
    """Qwen: windows only if enabled, and only from layer `max_window_layers` on."""
    if not c.flag("use_sliding_window"):
        return [None] * num_layers
    first = c.whole("max_window_layers", 28, minimum=0)
    return by_type(c, num_layers, lambda layer: layer >= first)


def qwen_moe_windows(c: ConfigReader, num_layers: int) -> Windows:
    return uniform_windows(c, num_layers) if c.flag("use_sliding_window") else [None] * num_layers


def by_type(c: ConfigReader, num_layers: int, slides: Callable[[int], bool]) -> Windows:
    return [_window_of(c, kind) for kind in layer_types(c, num_layers, slides)]


def layer_types(c: ConfigReader, num_layers: int, slides: Callable[[int], bool]) -> list[str]:
    """`layer_types` of the config, or else by the family's rule."""
    kinds = c.get("layer_types")
    if kinds is None:
        return ["sliding_attention" if slides(layer) else "full_attention" for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise c.fail("layer_types", f"is {kinds!r}; it must be a list of {num_layers} entries")
    return kinds


def _window_of(c: ConfigReader, kind: str) -> int | None:
    if kind == "full_attention":
        return None
    if kind == "sliding_attention":
        return c.whole("sliding_window")
    raise c.fail("layer_types", f"holds {kind!r}; full_attention and sliding_attention are supported")


def attention_bias(c: ConfigReader) -> dict[str, Any]:
    bias = c.flag("attention_bias")
    return {"qkv_bias": bias, "out_bias": bias}


def experts_of(c: ConfigReader, num_experts: int, inner_size: int, renormalise: bool) -> MoeSpec:
    top_k = c.whole("num_experts_per_tok")
    if top_k > num_experts:
        raise c.fail("num_experts_per_tok", f"is {top_k}, more than the {num_experts} experts")
    return MoeSpec(num_experts, top_k, inner_size, renormalise)
