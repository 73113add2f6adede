"""What stands between the products of an encoder's layer, each with the bias of the product before it.

bias_activation: make(kind) -> function (x [rows, width], bias) -> activation(x + bias)
bias_layer_norm: make() -> function (x [rows, width], bias, weight, offset, eps) -> layer norm of x + bias

Both may write into x, which is contiguous. `bias` and `offset` may be None.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from millrace.ops.base.activation_kind import Activation as ActivationKind
from millrace.ops.base.version import Version
from millrace.ops.cpp.native import avx512_missing, native
from millrace.ops.elementwise.activation import ACTIVATION_CODES, activate

BiasActivation = Callable[[Tensor, Tensor | None], Tensor]
BiasLayerNorm = Callable[[Tensor, Tensor | None, Tensor, Tensor | None, float], Tensor]


def make_bias_activation(kind: ActivationKind) -> BiasActivation:
    """The reference."""
    return lambda x, bias: activate(_plus(x, bias), kind).to(x.dtype)


def bias_layer_norm(x: Tensor, bias: Tensor | None, weight: Tensor, offset: Tensor | None, eps: float) -> Tensor:
    """The reference."""
    return F.layer_norm(_plus(x, bias), weight.shape, weight, offset, eps)


def _plus(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias


def make_native_activation(kind: ActivationKind) -> BiasActivation:
    kernels, code = native(), ACTIVATION_CODES[kind]

    def bias_activation(x: Tensor, bias: Tensor | None) -> Tensor:
        rows, width = x.shape
        kernels.for_rows(rows).bias_activation(code, x.data_ptr(), _address(bias), rows, width)
        return x

    return bias_activation


class NativeBiasLayerNorm:
    def __init__(self) -> None:
        self._native = native()

    def __call__(self, x: Tensor, bias: Tensor | None, weight: Tensor, offset: Tensor | None, eps: float) -> Tensor:
        rows, width = x.shape
        norm = self._native.for_rows(rows).bias_layer_norm
        norm(x.data_ptr(), _address(bias), weight.data_ptr(), _address(offset), rows, width, eps)
        return x


def _address(vector: Tensor | None) -> int | None:
    return None if vector is None else vector.data_ptr()


ACTIVATION_VERSIONS = (
    Version(
        op="bias_activation",
        name="native",
        make=make_native_activation,
        when="C++: one pass, in place",
        devices=("cpu",),
        dtypes=(torch.float32,),
        invariant_on=("cpu",),
        missing=avx512_missing,
    ),
    Version(
        op="bias_activation",
        name="reference",
        make=make_bias_activation,
        when="the reference: two passes",
        invariant_on=("cpu", "cuda"),
    ),
)
NORM_VERSIONS = (
    Version(
        op="bias_layer_norm",
        name="native",
        make=NativeBiasLayerNorm,
        when="C++: one pass over each row, in place",
        devices=("cpu",),
        dtypes=(torch.float32,),
        invariant_on=("cpu",),
        missing=avx512_missing,
    ),
    Version(
        op="bias_layer_norm",
        name="reference",
        make=lambda: bias_layer_norm,
        when="the reference: two passes",
        invariant_on=("cpu",),
    ),
)
