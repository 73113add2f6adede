"""RMS norm, or layer norm, over the last dimension, alone or fused with the residual addition before it.

rms_norm:      make() -> function (x, weight, eps, quantise=False) -> normed
add_rms_norm:  make() -> function (x, residual, weight, eps, quantise=False) -> (normed, x + residual)
layer_norm, add_layer_norm: the same, with weights [2, n]: a weight and a bias

Weights are float32 and include a model family's offset (Gemma's 1 + w).
With `quantise` (CUDA versions only) `normed` is a `Quantised` for an FP8 linear.
The Triton versions also accept an `Unsummed` as x and compute its sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from millrace.ops.base.quantised import Quantised
from millrace.ops.base.unsummed import Unsummed
from millrace.ops.base.version import Version
from millrace.ops.cpp.native import DTYPES, native, native_missing
from millrace.ops.triton import triton_missing


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * weight).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm(total, weight, eps), total


def rms_norm_fused(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


def add_rms_norm_fused(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm_fused(total, weight, eps), total


def layer_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x.float(), weight.shape[1:], weight[0], weight[1], eps).to(x.dtype)


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return layer_norm(total, weight, eps), total


class NativeRmsNorm:
    def __init__(self) -> None:
        self._native = native()

    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        dim = x.shape[-1]
        rows = x.numel() // dim
        number = DTYPES[x.dtype]
        self._native.for_rows(rows).norm(
            number, x.data_ptr(), None, weight.data_ptr(), out.data_ptr(), None, rows, dim, eps
        )
        return out


class NativeAddRmsNorm:
    def __init__(self) -> None:
        self._native = native()

    def __call__(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x, residual = x.contiguous(), residual.contiguous()
        out, total = torch.empty_like(x), torch.empty_like(x)
        dim = x.shape[-1]
        rows = x.numel() // dim
        self._native.for_rows(rows).norm(
            DTYPES[x.dtype],
            x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            total.data_ptr(),
            rows,
            dim,
            eps,
        )
        return out, total


def make_triton_rms_norm() -> Callable[..., Tensor | Quantised]:
    from millrace.ops.triton.norm import rms_norm as launch

    def normed(x: Tensor | Unsummed, weight: Tensor, eps: float, quantise: bool = False) -> Tensor | Quantised:
        values, scales = launch(x, weight, eps, quantise)
        return values if scales is None else Quantised(values, scales)

    return normed


class TritonAddRmsNorm:
    """One kernel; `of` normalises selected rows only."""

    def __init__(self) -> None:
        from millrace.ops.triton.norm import add_rms_norm, add_rms_norm_of

        self._launch, self.of = add_rms_norm, add_rms_norm_of

    def __call__(
        self, x: Tensor | Unsummed, residual: Tensor, weight: Tensor, eps: float, quantise: bool = False
    ) -> tuple[Tensor | Quantised, Tensor]:
        values, scales, total = self._launch(x, residual, weight, eps, quantise)
        return (values if scales is None else Quantised(values, scales)), total


def add_rms_norm_of(
    add_rms_norm: Callable[..., tuple[Any, Tensor]],
    x: Any,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    index: Tensor,
    out: Tensor,
) -> Tensor:
    """Write the norm of rows `index` of x + residual into `out`, using the given version of add_rms_norm."""
    if isinstance(add_rms_norm, TritonAddRmsNorm):
        return add_rms_norm.of(x, residual, weight, eps, index, out)
    normed, _ = add_rms_norm(x.index_select(0, index), residual.index_select(0, index), weight, eps)
    return out.copy_(normed)


RMS_NORM_VERSIONS = (
    Version(
        op="rms_norm",
        name="native",
        make=NativeRmsNorm,
        when="C++: two passes over each row while it is in the cache",
        devices=("cpu",),
        dtypes=tuple(DTYPES),
        invariant_on=("cpu",),
        missing=native_missing,
    ),
    Version(
        op="rms_norm",
        name="triton",
        make=make_triton_rms_norm,
        when="one kernel; each program keeps a row in registers",
        devices=("cuda",),
        invariant_on=("cuda",),
        missing=triton_missing,
    ),
    Version(
        op="rms_norm",
        name="fused",
        make=lambda: rms_norm_fused,
        when="torch's fused kernel between two casts",
        devices=("cuda",),
    ),
    Version(
        op="rms_norm",
        name="reference",
        make=lambda: rms_norm,
        when="the reference: float32 throughout, rounded once",
        invariant_on=("cpu",),
    ),
)

ADD_RMS_NORM_VERSIONS = (
    Version(
        op="add_rms_norm",
        name="native",
        make=NativeAddRmsNorm,
        when="C++: sum and norm of a row in one call",
        devices=("cpu",),
        dtypes=tuple(DTYPES),
        invariant_on=("cpu",),
        missing=native_missing,
    ),
    Version(
        op="add_rms_norm",
        name="triton",
        make=TritonAddRmsNorm,
        when="one kernel; each program keeps a row in registers",
        devices=("cuda",),
        invariant_on=("cuda",),
        missing=triton_missing,
    ),
    Version(
        op="add_rms_norm",
        name="fused",
        make=lambda: add_rms_norm_fused,
        when="torch's fused kernel between two casts",
        devices=("cuda",),
    ),
    Version(
        op="add_rms_norm",
        name="reference",
        make=lambda: add_rms_norm,
        when="the reference: the sum in the model's dtype, the norm in float32",
        invariant_on=("cpu",),
    ),
)

LAYER_NORM_VERSIONS = (
    Version(
        op="layer_norm",
        name="torch",
        make=lambda: layer_norm,
        when="the reference: torch's kernel in float32, rounded once; a row at a time",
        invariant_on=("cpu",),
    ),
)

ADD_LAYER_NORM_VERSIONS = (
    Version(
        op="add_layer_norm",
        name="torch",
        make=lambda: add_layer_norm,
        when="the reference: the sum in the model's dtype, the norm in float32",
        invariant_on=("cpu",),
    ),
)
