"""The parts of an encoder's layer, and layers whose products are followed by C++."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from millrace.models.encoders.spec import EncoderSpec
from millrace.ops.base.activation_kind import Activation as ActivationKind
from millrace.ops.elementwise.biased import BiasActivation, BiasLayerNorm
from millrace.ops.registry import choose

Mixer = Callable[[Tensor], Tensor]
"""Attention: from queries, keys and values [tokens, 3, heads, head] to [tokens, heads, head]."""


@dataclass(frozen=True, slots=True)
class Linear:
    weight: Tensor
    """[out, in]"""
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Norm:
    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


Product = Callable[[Tensor], Tensor]
"""A linear layer, in floats or in INT8."""


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    qkv: Product
    out: Product
    attention_norm: Norm | None
    """None in the first layer of ModernBERT, whose input is already normalised."""
    up: Product
    """Of a gated MLP: the rows of the gate, then those of up."""
    down: Product
    mlp_norm: Norm


KINDS: dict[str, ActivationKind] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}
"""Activations that C++ knows, by the names in configs."""


@dataclass(frozen=True, slots=True)
class FusedLayers:
    """Layers with their norms behind, whose products are plain: a product adds to the residual in place, and its bias
    is added with what comes next."""

    num_heads: int
    activate: BiasActivation
    norm: BiasLayerNorm

    def __call__(self, x: Tensor, layer: EncoderLayer, mix: Mixer) -> Tensor:
        """`x` is overwritten."""
        attention_norm, mlp_norm = layer.attention_norm, layer.mlp_norm
        out, up, down = (_plain(product) for product in (layer.out, layer.up, layer.down))
        assert attention_norm is not None
        heads = mix(layer.qkv(x).view(len(x), 3, self.num_heads, -1)).reshape(x.shape)
        x = self._normed(x.addmm_(heads, out.weight.t()), out, attention_norm)
        wide = self.activate(torch.mm(x, up.weight.t()), up.bias)
        return self._normed(x.addmm_(wide, down.weight.t()), down, mlp_norm)

    def _normed(self, x: Tensor, linear: Linear, norm: Norm) -> Tensor:
        return self.norm(x, linear.bias, norm.weight, norm.bias, norm.eps)


def fused_layers(spec: EncoderSpec, layers: Sequence[EncoderLayer], device: torch.device) -> FusedLayers | None:
    """None if a layer has another form, or there is no C++ for this device and dtype."""
    kind, dtype = KINDS.get(spec.activation), layers[0].mlp_norm.weight.dtype
    if kind is None or spec.is_gated or spec.is_pre_norm or not all(map(_has_plain_products, layers)):
        return None
    activate, norm = (choose(op, device, dtype) for op in ("bias_activation", "bias_layer_norm"))
    if {activate.version.name, norm.version.name} != {"native"}:
        return None
    return FusedLayers(spec.num_heads, activate.make(kind), norm.make())


def _has_plain_products(layer: EncoderLayer) -> bool:
    return all(isinstance(product, Linear) for product in (layer.out, layer.up, layer.down))


def _plain(product: Product) -> Linear:
    assert isinstance(product, Linear)
    return product
