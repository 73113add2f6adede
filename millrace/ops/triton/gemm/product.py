"""Matrix products with few rows: y = x W^T, with W [N, K] as it is stored.

With few rows the time goes into reading the weight: what matters is bytes in flight and enough programs. `Tiles` says
how a product is cut; `choice.py` looks the fastest ones up. One program computes a tile of the output or, with split K,
a part of every sum in it. Parts go to a float32 workspace; the last program to arrive adds them in a fixed order, so
the result does not depend on which one that is, and resets the tile's counter to zero for the next launch.

With an FP8 weight, x is FP8 with a scale per row, or in the model's dtype, which only gemv takes.

Kinds:  gemv      no matrix unit: products in registers, summed along K at the end; one or two rows.
        dot       x is the left operand; a tile has 16 rows or more.
        swap      W is the left operand: Hopper's warpgroup instruction needs 64 rows on the left, and W has them.
        …_tma     operands are loaded by the tensor memory accelerator (TMA).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from millrace.ops.base.quantised import FP8
from millrace.ops.triton.gemm import kernels

Kind = Literal["gemv", "dot", "swap", "dot_tma", "swap_tma"]


@dataclass(frozen=True, slots=True)
class Tiles:
    """How one product is cut: rows (m), outputs (n) and inputs (k) of one program's tile, and how it runs."""

    kind: Kind
    m: int
    n: int
    k: int
    split: int = 1
    """Parts that the sums over K are split into."""
    warps: int = 4
    stages: int = 4
    pdl: bool = False
    """Programmatic dependent launch: start while the previous kernel runs, prefetch weights, wait before reading x."""
    ahead: int = 1
    """With pdl: tiles of weights a program prefetches before it waits."""
    shared_x: bool = False
    """gemv: load x once for all weight rows of a tile."""
    parallel: bool = True
    """True if each part of a split sum has its own program; otherwise one program computes them in order. The result is
    the same, bit for bit."""

    def count(self, rows: int, outputs: int) -> int:
        """Number of output tiles."""
        return -(-rows // self.m) * -(-outputs // self.n)

    def takes(self, rows: int) -> bool:
        return self.kind != "gemv" or rows <= self.m


# --- launching ---


@dataclass(frozen=True, slots=True)
class Scales:
    """Scales of the operands: one per row of x (None if x is not FP8), and one per output of the weight."""

    x: Tensor | None
    weight: Tensor


def new_counters(count: int, device: torch.device) -> Tensor:
    """Counters of a split product, zero between launches. Products that may run concurrently need separate ones."""
    return torch.zeros(count, dtype=torch.int32, device=device)


def multiply(
    x: Tensor,
    weight: Tensor,
    tiles: Tiles,
    *,
    bias: Tensor | None = None,
    scales: Scales | None = None,
    activation: str = "",
    out_dtype: torch.dtype | None = None,
    counters: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """[T, K] and [N, K] -> [T, N]. With an activation the weight's rows are gates, then ups: act(gate) * up [T, N / 2].

    `counters` are needed if the tiles are split and parallel: at least `tiles.count(T, outputs)` of them.
    """
    outputs = weight.shape[0] // (2 if activation else 1)
    if out is None:
        out = torch.empty((x.shape[0], outputs), dtype=out_dtype or x.dtype, device=x.device)
    _Launch(x, weight, tiles, bias, scales, activation, out, counters).run()
    return out


class _Launch:
    """One product's operands, and the kernel arguments that describe them."""

    def __init__(
        self,
        x: Tensor,
        weight: Tensor,
        tiles: Tiles,
        bias: Tensor | None,
        scales: Scales | None,
        activation: str,
        out: Tensor,
        counters: Tensor | None,
    ) -> None:
        if x.stride(1) != 1 or (tiles.kind.endswith("_tma") and not _aligned(x)):
            x = x.clone(memory_format=torch.contiguous_format)
        self.x, self.weight, self.tiles, self.bias, self.scales = x, weight, tiles, bias, scales
        self.activation, self.out, self.counters = activation, out, counters

    def run(self) -> None:
        if self.x.shape[0] == 0:
            return
        if self.tiles.kind == "gemv":
            self._gemv()
        else:
            self._gemm()

    def _options(self) -> dict[str, Any]:
        tiles, inputs = self.tiles, self.weight.shape[1]
        options: dict[str, Any] = {
            "BLOCK_N": tiles.n,
            "BLOCK_K": tiles.k,
            "ACTIVATION": self.activation,
            "HAS_BIAS": self.bias is not None,
            "SCALED": self.scales is not None,
            "ROW_SCALED": self.scales is not None and self.scales.x is not None,
            "EVEN_K": inputs % tiles.k == 0,
            "EARLY": tiles.pdl,
            "ITEM": self.weight.element_size(),
            "num_warps": tiles.warps,
            "num_stages": tiles.stages,
        }
        return {**options, "launch_pdl": True} if tiles.pdl else options

    def _operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """Bias and scales; where one is missing, any tensor: the kernel does not read it."""
        out, scales = self.out, self.scales
        x_scale = out if scales is None or scales.x is None else scales.x
        return out if self.bias is None else self.bias, x_scale, out if scales is None else scales.weight

    def _gemv(self) -> None:
        rows, outputs = self.out.shape
        tiles = self.tiles
        if rows > 2:
            raise ValueError(f"tiles of kind gemv take one or two rows, not {rows}")
        kernels.gemv_kernel[(-(-outputs // tiles.n),)](
            self.x,
            self.weight,
            *self._operands(),
            self.out,
            outputs,
            self.weight.shape[1],
            _row_stride(self.x),
            outputs,
            tiles.ahead * tiles.k,
            ROWS=rows,
            SHARED_X=tiles.shared_x,
            **self._options(),
        )

    def _gemm(self) -> None:
        tiles, (rows, outputs) = self.tiles, self.out.shape
        if self.weight.dtype == FP8 and self.x.dtype != FP8:
            raise ValueError(f"with an FP8 weight, tiles of kind {tiles.kind} need FP8 rows, not {self.x.dtype}")
        tma = tiles.kind.endswith("_tma")
        left, right = _descriptors(self.x, self.weight, tiles) if tma else (self.x, self.weight)
        partial, programs = self._parts()
        kernels.gemm_kernel[(tiles.count(rows, outputs) * programs,)](
            left,
            right,
            *self._operands(),
            self.out,
            partial,
            self.out if self.counters is None else self.counters,
            self.weight,
            rows,
            outputs,
            self.weight.shape[1],
            _row_stride(self.x),
            outputs,
            tiles.split,
            tiles.ahead * tiles.k,
            BLOCK_M=tiles.m,
            SUMS="whole" if tiles.split == 1 else "parallel" if tiles.parallel else "serial",
            COPIES=2 if self.activation else 1,
            PARTS=_parts_ahead(tiles),
            SWAP=tiles.kind.startswith("swap"),
            TMA=tma,
            PRECISION="ieee" if self.x.dtype == torch.float32 else "tf32",
            **self._options(),
        )

    def _parts(self) -> tuple[Tensor, int]:
        """Workspace for the parts of split sums, and the number of programs that compute them."""
        tiles, (rows, outputs) = self.tiles, self.out.shape
        if tiles.split == 1 or not tiles.parallel:
            return self.out, 1
        count = tiles.count(rows, outputs)
        if self.counters is None or self.counters.shape[0] < count:
            raise ValueError(f"a split product of {count} tiles needs {count} counters")
        size = count * tiles.split * (2 if self.activation else 1) * tiles.m * tiles.n
        return torch.empty(size, dtype=torch.float32, device=self.x.device), tiles.split


def _parts_ahead(tiles: Tiles) -> int:
    """Parts of a sum to load at a time: four if they take at most 128 registers per thread."""
    return 4 if tiles.m * tiles.n <= 32 * 32 * tiles.warps else 1


def _row_stride(x: Tensor) -> int:
    """Distance between rows. A single row may have any stride; its length is used."""
    return x.stride(0) if x.shape[0] > 1 else x.shape[1]


def _aligned(x: Tensor) -> bool:
    """True if TMA can address it: rows start at multiples of 16 bytes."""
    return x.data_ptr() % 16 == 0 and _row_stride(x) * x.element_size() % 16 == 0


def _descriptors(x: Tensor, weight: Tensor, tiles: Tiles) -> tuple[Any, Any]:
    from triton.tools.tensor_descriptor import TensorDescriptor

    left = TensorDescriptor(x, list(x.shape), [_row_stride(x), 1], [tiles.m, tiles.k])
    return left, TensorDescriptor(weight, list(weight.shape), [weight.shape[1], 1], [tiles.n, tiles.k])
