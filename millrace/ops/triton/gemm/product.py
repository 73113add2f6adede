"""Matrix products with few rows: y = x W^T, with W [N, K] as it is stored.

With few rows a product is nothing but reading the weight: what matters is bytes in flight and enough programs. `Tiles`
says how a product is cut; `gemm_table` holds what was measured to be best. One program computes a tile of the output,
or, split along K, a part of every sum of it. The parts go to a float32 workspace; the program that arrives last adds
them up in a fixed order, so that the result does not depend on which one that is, and sets the tile's counter back to
zero for the next launch.

Beside a weight in eight bits x has a scale per row; or it is in the model's dtype, which only the kind gemv takes.

Kinds:  gemv      no matrix unit: products in registers, summed along K at the end; one or two rows.
        dot       x is the left operand; the tile of rows has 16 or more.
        swap      W is the left operand: Hopper's wide instruction takes 64 rows of the left operand, and W has them.
        …_tma     operands are fetched by the tensor memory unit.
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
    """How one product is cut: the tile of one program in rows, outputs and inputs, and how it is run."""

    kind: Kind
    m: int
    n: int
    k: int
    split: int = 1
    """Into how many parts the sums over K are cut."""
    warps: int = 4
    stages: int = 4
    pdl: bool = False
    """Start while the kernel before still runs, fetch weights, and wait for it only before x is read."""
    ahead: int = 1
    """How many tiles of its weights an early program fetches before it waits."""
    shared_x: bool = False
    """gemv: fetch x once for all rows of a tile."""
    parallel: bool = True
    """Whether the parts of the sums are programs of their own. If not, one program computes them one after the other;
    the result is the same, bit for bit."""

    def count(self, rows: int, outputs: int) -> int:
        """Tiles of the output."""
        return -(-rows // self.m) * -(-outputs // self.n)

    def takes(self, rows: int) -> bool:
        return self.kind != "gemv" or rows <= self.m


# --- launching ---


@dataclass(frozen=True, slots=True)
class Scales:
    """What the operands were divided by: one number for each row of x, None where x is not in eight bits; and one for
    each output."""

    x: Tensor | None
    weight: Tensor


def new_counters(count: int, device: torch.device) -> Tensor:
    """Counters for a split product: all zero between launches. Products that may run at once need their own."""
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

    `counters` is needed where the tiles are split and parallel: at least `tiles.count(T, outputs)` of them.
    """
    outputs = weight.shape[0] // (2 if activation else 1)
    if out is None:
        out = torch.empty((x.shape[0], outputs), dtype=out_dtype or x.dtype, device=x.device)
    _Launch(x, weight, tiles, bias, scales, activation, out, counters).run()
    return out


class _Launch:
    """One product's operands, and what its kernel is told about them."""

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
        """Bias and scales; where there are none, any tensor, which the kernel does not read."""
        out, scales = self.out, self.scales
        x_scale = out if scales is None or scales.x is None else scales.x
        return out if self.bias is None else self.bias, x_scale, out if scales is None else scales.weight

    def _gemv(self) -> None:
        rows, outputs = self.out.shape
        tiles = self.tiles
        if rows > 2:
            raise ValueError(f"the kind gemv takes one or two rows, not {rows}")
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
            raise ValueError(f"beside a weight in eight bits the kind {tiles.kind} takes no rows in {self.x.dtype}")
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
        """Room for the parts of split sums, and how many programs compute them."""
        tiles, (rows, outputs) = self.tiles, self.out.shape
        if tiles.split == 1 or not tiles.parallel:
            return self.out, 1
        count = tiles.count(rows, outputs)
        if self.counters is None or self.counters.shape[0] < count:
            raise ValueError(f"a product split over {count} tiles needs as many counters")
        size = count * tiles.split * (2 if self.activation else 1) * tiles.m * tiles.n
        return torch.empty(size, dtype=torch.float32, device=self.x.device), tiles.split


def _parts_ahead(tiles: Tiles) -> int:
    """How many parts of a sum to fetch at a time: four, where they take at most 128 registers of a thread."""
    return 4 if tiles.m * tiles.n <= 32 * 32 * tiles.warps else 1


def _row_stride(x: Tensor) -> int:
    """Between two rows; that of a single row may be anything, and counts as its length."""
    return x.stride(0) if x.shape[0] > 1 else x.shape[1]


def _aligned(x: Tensor) -> bool:
    """Whether the tensor memory unit can address it: rows that start at whole 16 bytes."""
    return x.data_ptr() % 16 == 0 and _row_stride(x) * x.element_size() % 16 == 0


def _descriptors(x: Tensor, weight: Tensor, tiles: Tiles) -> tuple[Any, Any]:
    from triton.tools.tensor_descriptor import TensorDescriptor

    left = TensorDescriptor(x, list(x.shape), [_row_stride(x), 1], [tiles.m, tiles.k])
    return left, TensorDescriptor(weight, list(weight.shape), [weight.shape[1], 1], [tiles.n, tiles.k])
