"""The first half of a gated MLP: act(x Wg^T + bg) · (x Wu^T + bu), where the weight [2 I, K] holds Wg above Wu.

make(weight, bias, activation, linear, gated) -> GatedLinear. `linear` makes a Linear from a weight and bias, `gated` is
the op of that name for the same activation; the composed version calls both and accepts any weight that `linear` does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from millrace.ops.base.activation_kind import Activation
from millrace.ops.base.version import Shape, Version
from millrace.ops.linear.dense import Linear
from millrace.ops.linear.fp8 import fp8_missing
from millrace.ops.triton import hopper_missing

if TYPE_CHECKING:
    from millrace.ops.triton.gemm.choice import TilesByRows

MakeLinear = Callable[[Any, Tensor | None], Linear]
Gated = Callable[..., Any]
"""(gate_up [T, 2 I], quantise=False) -> [T, I] as Tensor or Quantised"""


class GatedLinear(ABC):
    """Base of all versions: the two ops that a version may fuse."""

    def __init__(self, linear: Linear, gated: Gated) -> None:
        self.linear, self.gated = linear, gated
        self.num_bytes, self.takes_fp8 = linear.num_bytes, linear.takes_fp8
        self.has_decode_kernel = linear.has_decode_kernel

    @abstractmethod
    def __call__(self, x: Any, quantise: bool = False) -> Any:
        """[T, K] -> [T, I], as Tensor or Quantised. With `quantise` the result is for an FP8 linear: `Quantised`, or a
        Tensor where it is faster to let that linear quantise it."""
        ...

    def decode(self, x: Tensor) -> Any:
        """The same for decode rows."""
        return self.gated(self.linear.decode(x)) if self.has_decode_kernel else self(x)


class ComposedGatedLinear(GatedLinear):
    """The reference: a linear layer, then the gated activation."""

    def __init__(
        self, weight: Any, bias: Tensor | None, activation: Activation, linear: MakeLinear, gated: Gated
    ) -> None:
        super().__init__(linear(weight, bias), gated)

    def __call__(self, x: Any, quantise: bool = False) -> Any:
        return self.gated(self.linear(x), quantise=quantise)


class TunedGatedLinear(GatedLinear):
    """One fused kernel where that was measured faster: one for few rows, another for many."""

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

        super().__init__(linear(weight, bias), gated)
        self._weight, self._bias, self._activation = weight, bias, activation
        self._multiply = gemm.multiply
        self._tiles = tiles or gemm_choice.measured("gated", weight)
        self._counters = self._tiles.counters(weight.shape[0] // 2, weight.device)
        self._many_tiles = gemm_choice.measured_many(weight, bias, activation)

    def __call__(self, x: Any, quantise: bool = False) -> Any:
        if quantise:
            return self.gated(self.linear(x), quantise=True)
        tiles = self._tiles.of(x.shape[0])
        if tiles is not None:
            return self._multiply(
                x, self._weight, tiles, bias=self._bias, activation=self._activation, counters=self._counters
            )
        many = self._many_tiles.of(x.shape[0])
        return self.gated(self.linear(x)) if many is None else self._gated_many(x, many)

    def _gated_many(self, x: Tensor, tile: tuple[int, int]) -> Tensor:
        from millrace.ops.triton.gemm.gated_many import gated_many  # slow to import

        return gated_many(x, self._weight, self._activation, tile)


class TunedFp8GatedLinear(GatedLinear):
    """As TunedGatedLinear, over an FP8 weight. The fused kernel returns the model's dtype, because no program sees
    a whole row, whose scale it would need. Otherwise linear and gated run one after the other, and gated quantises."""

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

        made: Any = linear(weight, bias)
        super().__init__(made, gated)
        self._activation, self._dtype, self._weight, self._bias = activation, weight.dtype, made.weight, bias
        self._multiply, self._new_scales = gemm.multiply, gemm.Scales
        self._tiles = tiles or gemm_choice.measured("fp8_gated", made.weight.values)
        self._counters = self._tiles.counters(weight.shape[0] // 2, weight.device)

    def __call__(self, x: Any, quantise: bool = False) -> Any:
        tiles = None if isinstance(x, Tensor) else self._tiles.of(x.shape[0])
        if tiles is None:
            return self.gated(self.linear(x), quantise=quantise)
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
        when="over an FP8 weight, by a table measured for each size and number of rows",
        devices=("cuda",),
        dtypes=(torch.bfloat16,),
        fits=_fp8_sizes,
        missing=_fp8_tuned_missing,
    ),
    Version(
        op="gated_linear",
        name="tuned",
        make=TunedGatedLinear,
        when="by a table measured for each size and number of rows: one fused Triton kernel, or linear and gated",
        devices=("cuda",),
        dtypes=(torch.bfloat16,),
        fits=lambda shape: not shape.get("quantised", False) and not shape.get("grouped", False),
        missing=hopper_missing,
    ),
    Version(
        op="gated_linear",
        name="composed",
        make=ComposedGatedLinear,
        when="the reference: the ops linear and gated in sequence; batch-invariant if they are",
        invariant_on=("cpu", "cuda"),
    ),
)
