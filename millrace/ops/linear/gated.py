"""The first half of a gated MLP: act(x Wg^T + bg) · (x Wu^T + bu), where the weight [2 I, K] holds Wg above Wu.

make(weight, bias, activation, linear, gated) -> GatedLinear, where `linear` makes a Linear of a weight and bias, and
`gated` is the op of that name for the same activation: what the composed version consists of. That version takes as a
weight whatever `linear` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from millrace.ops.activation import Activation
from millrace.ops.linear.dense import Linear, NativeParts
from millrace.ops.linear.fp8 import fp8_missing
from millrace.ops.linear.quantised import Quantised
from millrace.ops.triton import hopper_missing
from millrace.ops.version import Shape, Version

if TYPE_CHECKING:
    from millrace.ops.triton.gemm.choice import TilesByRows

MakeLinear = Callable[[Any, Tensor | None], Linear]
Gated = Callable[..., Any]
"""(gate_up [T, 2 I], quantise=False) -> [T, I], as a Tensor or as Quantised"""


class GatedLinear(Protocol):
    num_bytes: int

    @property
    def takes_fp8(self) -> bool: ...

    def __call__(self, x: Any, quantise: bool = False) -> Tensor | Quantised:
        """[T, K] -> [T, I]. With `quantise` the result is for a linear that takes FP8: `Quantised`, or a Tensor where
        it is faster to let that linear quantise it."""
        ...


class ComposedGatedLinear:
    """The reference: a linear layer, then the gated activation of what it gives."""

    def __init__(
        self, weight: Any, bias: Tensor | None, activation: Activation, linear: MakeLinear, gated: Gated
    ) -> None:
        self.linear, self._gated = linear(weight, bias), gated
        self.num_bytes = self.linear.num_bytes
        self.takes_fp8 = self.linear.takes_fp8

    def __call__(self, x: Any, quantise: bool = False) -> Any:
        return self._gated(self.linear(x), quantise=quantise)

    def decode(self, x: Tensor) -> Any:
        """The same for rows that decode."""
        linear = self.linear
        return self._gated(linear.decode(x) if isinstance(linear, NativeParts) else linear(x))


class TunedGatedLinear:
    """One kernel that computes matching gates and ups and writes their product, where that was measured faster: one for
    few rows, another for many."""

    takes_fp8 = False

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        activation: Activation,
        linear: MakeLinear,
        gated: Gated,
        tiles: TilesByRows | None = None,
    ) -> None:
        from millrace.ops.triton.gemm import choice as gemm_choice
        from millrace.ops.triton.gemm import product as gemm
        from millrace.ops.triton.gemm import table as gemm_table

        self._weight, self._bias, self._activation = weight, bias, activation
        self._linear, self._gated = linear(weight, bias), gated
        self.num_bytes = self._linear.num_bytes
        self._multiply = gemm.multiply
        self._tiles = tiles or gemm_choice.measured(gemm_table.GATED, weight)
        self._counters = self._tiles.counters(weight.shape[0] // 2, weight.device)
        self._many_tiles = gemm_choice.measured_many(weight, bias, activation)

    def __call__(self, x: Any, quantise: bool = False) -> Any:
        if quantise:
            return self._gated(self._linear(x), quantise=True)
        tiles = self._tiles.of(x.shape[0])
        if tiles is not None:
            return self._multiply(
                x, self._weight, tiles, bias=self._bias, activation=self._activation, counters=self._counters
            )
        many = self._many_tiles.of(x.shape[0])
        return self._gated(self._linear(x)) if many is None else self._gated_many(x, many)

    def _gated_many(self, x: Tensor, tile: tuple[int, int]) -> Tensor:
        from millrace.ops.triton.gemm.gated_many import gated_many  # what it needs takes a while to import

        return gated_many(x, self._weight, self._activation, tile)


class TunedFp8GatedLinear:
    """The same over a weight in eight bits. One kernel's result is in the model's dtype, since no program of it knows
    the largest of a row; where that was not measured faster, parts make it, the second of which quantises."""

    takes_fp8 = True

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        activation: Activation,
        linear: MakeLinear,
        gated: Gated,
        tiles: TilesByRows | None = None,
    ) -> None:
        from millrace.ops.triton.gemm import choice as gemm_choice
        from millrace.ops.triton.gemm import product as gemm
        from millrace.ops.triton.gemm import table as gemm_table

        made: Any = linear(weight, bias)
        self._linear, self._gated, self._activation = made, gated, activation
        self._dtype, self._weight, self._bias = weight.dtype, made.weight, bias
        self.num_bytes = made.num_bytes
        self._multiply, self._new_scales = gemm.multiply, gemm.Scales
        self._tiles = tiles or gemm_choice.measured(gemm_table.FP8_GATED, weight)
        self._counters = self._tiles.counters(weight.shape[0] // 2, weight.device)

    def __call__(self, x: Any, quantise: bool = False) -> Any:
        tiles = None if isinstance(x, Tensor) else self._tiles.of(x.shape[0])
        if tiles is None:
            return self._gated(self._linear(x), quantise=quantise)
        return self._multiply(
            x.values,
            self._weight.values,
            tiles,
            bias=self._bias,
            scales=self._new_scales(x.scales, self._weight.scales),
            activation=self._activation,
            out_dtype=self._dtype,
            counters=self._counters,
        )


def _fp8_sizes(shape: Shape) -> bool:
    return bool(shape.get("quantised") and shape["in_features"] % 16 == 0 and shape["out_features"] % 16 == 0)


def _fp8_tuned_missing(device: torch.device) -> str:
    return fp8_missing(device) or hopper_missing(device)


VERSIONS = (
    Version(
        op="gated_linear",
        name="tuned_fp8",
        make=TunedFp8GatedLinear,
        when="over a weight in eight bits, by a table measured for each size and number of rows",
        devices=("cuda",),
        dtypes=(torch.bfloat16,),
        fits=_fp8_sizes,
        missing=_fp8_tuned_missing,
    ),
    Version(
        op="gated_linear",
        name="tuned",
        make=TunedGatedLinear,
        when="by a table measured for each size and number of rows: one Triton kernel for all of it, or its parts",
        devices=("cuda",),
        dtypes=(torch.bfloat16,),
        fits=lambda shape: not shape.get("quantised", False),
        missing=hopper_missing,
    ),
    Version(
        op="gated_linear",
        name="composed",
        make=ComposedGatedLinear,
        when="defines the meaning: the ops linear and gated one after the other, as invariant as they are",
        invariant_on=("cpu", "cuda"),
    ),
)
