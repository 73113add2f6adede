"""A linear layer with an FP8 weight, one scale per output: y = (x W^T) * scales + b.

make(weight, bias) -> Linear. The weight is a Tensor in the model's dtype that is quantised here, and to which no
reference is kept, or a `StoredFp8` of a checkpoint.
Inputs are `Quantised` if the op before fuses quantisation, else a Tensor that is quantised first; kernels for a single
row take it unquantised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from millrace.ops.base.capability import capability
from millrace.ops.base.quantised import Quantised, quantise_rows, quantise_weight
from millrace.ops.base.version import Shape, Version
from millrace.ops.linear.dense import TILE_ROWS, Linear
from millrace.ops.triton import hopper_missing, triton_missing

if TYPE_CHECKING:
    from millrace.ops.triton.gemm.choice import Fp8Tiles
    from millrace.ops.triton.gemm.product import Tiles

FP8_CAPABILITY = (8, 9)
"""First compute capability with FP8 matrix products."""


@dataclass(frozen=True, slots=True)
class StoredFp8:
    """An FP8 weight [N, K] with one scale per output, as a checkpoint stores it."""

    quantised: Quantised
    dtype: torch.dtype
    """The model's dtype."""

    @property
    def shape(self) -> torch.Size:
        return self.quantised.shape

    @property
    def device(self) -> torch.device:
        return self.quantised.values.device


class Fp8Weight(Linear):
    """Base of all versions: the quantised weight."""

    takes_fp8 = True

    def __init__(self, weight: Tensor | StoredFp8, bias: Tensor | None = None) -> None:
        self.dtype = weight.dtype
        self.weight = weight.quantised if isinstance(weight, StoredFp8) else quantise_weight(weight)
        self.bias = bias
        self.num_bytes = self.weight.values.nbytes + self.weight.scales.nbytes + (0 if bias is None else bias.nbytes)


class Fp8Reference(Fp8Weight):
    """Widens both operands to float32 and multiplies them in fixed tiles of rows."""

    def __call__(self, x: Tensor | Quantised) -> Tensor:
        wide = (quantise_rows(x) if isinstance(x, Tensor) else x).widen()
        weight = self.weight.widen()
        bias = None if self.bias is None else self.bias.float()
        rows = wide.shape[0]
        tiles = torch.split(F.pad(wide, (0, 0, 0, -rows % TILE_ROWS)), TILE_ROWS)
        return torch.cat([F.linear(tile, weight, bias) for tile in tiles])[:rows].to(self.dtype)


class Fp8ScaledMm(Fp8Weight):
    """torch._scaled_mm."""

    def __init__(self, weight: Tensor | StoredFp8, bias: Tensor | None = None) -> None:
        super().__init__(weight, bias)
        self._right = self.weight.values.t()
        self._right_scales = self.weight.scales[None, :]

    def __call__(self, x: Tensor | Quantised) -> Tensor:
        return self._scaled_mm(quantise_rows(x) if isinstance(x, Tensor) else x)

    def _scaled_mm(self, x: Quantised) -> Tensor:
        out: Tensor = torch._scaled_mm(
            x.values,
            self._right,
            scale_a=x.scales[:, None],
            scale_b=self._right_scales,
            out_dtype=self.dtype,
            use_fast_accum=True,
        )
        return out if self.bias is None else out.add_(self.bias)


class Fp8Tuned(Fp8ScaledMm):
    """Uses what was measured fastest for the number of rows: torch._scaled_mm or a Triton kernel."""

    def __init__(self, weight: Tensor | StoredFp8, bias: Tensor | None = None, tiles: Fp8Tiles | None = None) -> None:
        from millrace.ops.triton import quantise as fp8
        from millrace.ops.triton.gemm import choice as gemm_choice
        from millrace.ops.triton.gemm import product as gemm

        super().__init__(weight, bias)
        self._quantise = fp8.quantise_rows
        self._multiply, self._new_scales = gemm.multiply, gemm.Scales
        self._tiles = tiles or gemm_choice.measured_fp8(self.weight.values)
        self._counters = self._tiles.rows.counters(weight.shape[0], weight.device)

    def __call__(self, x: Tensor | Quantised) -> Tensor:
        rows = x.shape[0]
        if isinstance(x, Tensor):
            tiles = self._tiles.wide.of(rows)
            if tiles is not None:
                return self._product(x, None, tiles)
            x = self._quantise(x)
        tiles = self._tiles.rows.of(rows)
        return self._scaled_mm(x) if tiles is None else self._product(x.values, x.scales, tiles)

    def _product(self, x: Tensor, scales: Tensor | None, tiles: Tiles) -> Tensor:
        return self._multiply(
            x,
            self.weight.values,
            tiles,
            bias=self.bias,
            scales=self._new_scales(scales, self.weight.scales),
            out_dtype=self.dtype,
            counters=self._counters,
        )


class Fp8Invariant(Fp8Weight):
    """A Triton kernel for any size that splits sums by the weight's size only."""

    def __init__(self, weight: Tensor | StoredFp8, bias: Tensor | None = None) -> None:
        from millrace.ops.triton import quantise as fp8
        from millrace.ops.triton.gemm import choice as gemm_choice
        from millrace.ops.triton.gemm import product as gemm

        super().__init__(weight, bias)
        self._quantise = fp8.quantise_rows
        self._multiply, self._new_scales, self._choose = gemm.multiply, gemm.Scales, gemm_choice.invariant
        self._counters = gemm_choice.invariant_counters(weight.shape[0], weight.device)

    def __call__(self, x: Tensor | Quantised) -> Tensor:
        if isinstance(x, Tensor):
            x = self._quantise(x)
        return self._multiply(
            x.values,
            self.weight.values,
            self._choose(x.shape[0], self.weight.values),
            bias=self.bias,
            scales=self._new_scales(x.scales, self.weight.scales),
            out_dtype=self.dtype,
            counters=self._counters,
        )


def fp8_missing(device: torch.device) -> str:
    """What the device lacks for FP8 matrix products, as a clause."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return "needs a GPU"
    if capability(device) < FP8_CAPABILITY:
        return "needs compute capability 8.9"
    return ""


def _tuned_missing(device: torch.device) -> str:
    return fp8_missing(device) or hopper_missing(device)


def _triton_missing(device: torch.device) -> str:
    return fp8_missing(device) or triton_missing(device)


def _scaled_mm_sizes(shape: Shape) -> bool:
    return bool(shape["in_features"] % 16 == 0 and shape["out_features"] % 16 == 0)


VERSIONS = (
    Version(
        op="fp8_linear",
        name="tuned",
        make=Fp8Tuned,
        when="by a table measured for each size and number of rows: torch._scaled_mm or Triton kernels",
        devices=("cuda",),
        dtypes=(torch.bfloat16,),
        fits=_scaled_mm_sizes,
        missing=_tuned_missing,
    ),
    Version(
        op="fp8_linear",
        name="invariant",
        make=Fp8Invariant,
        when="Triton for any size, sums split by the weight's size only: same sums whatever the batch",
        devices=("cuda",),
        invariant_on=("cuda",),
        missing=_triton_missing,
    ),
    Version(
        op="fp8_linear",
        name="reference",
        make=Fp8Reference,
        when="the reference: both operands widened to float32",
        invariant_on=("cpu",),
    ),
)
