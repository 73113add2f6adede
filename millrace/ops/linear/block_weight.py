"""A weight as the blocks of a GGUF file, and its linears on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.nn import functional as F

from millrace.ops.linear.dense import Head

MAX_ROWS_IN_REGISTERS = 64
"""More rows decode the whole weight, multiply it by torch's linear, and drop it."""


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """A weight [N, K] in one of GGUF's formats (`kind`). A value is its dequantised number rounded to `dtype`."""

    kind: str
    blocks: Tensor
    """uint8 [N, bytes of a row], as in the file."""
    in_features: int
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int]:
        return self.blocks.shape[0], self.in_features

    @property
    def num_bytes(self) -> int:
        return self.blocks.nbytes

    def to(self, device: torch.device) -> BlockWeight:
        return replace(self, blocks=self.blocks.to(device))

    def dequantised(self, first: int = 0, last: int | None = None) -> Tensor:
        """float32 rows first to last, by the reference."""
        from gguf import GGMLQuantizationType  # slow to import

        from millrace.ops.linear.gguf_values import dequantise

        rows = self.blocks[first:last].cpu()
        out = torch.empty((rows.shape[0], self.in_features))
        dequantise(rows.numpy(), GGMLQuantizationType[self.kind], out)
        return out.to(self.blocks.device)


def join_blocks(weights: Sequence[BlockWeight]) -> BlockWeight | tuple[BlockWeight, ...]:
    """The weights as one, if all have the same format."""
    first = weights[0]
    if len(weights) == 1:
        return first
    if len({weight.kind for weight in weights}) > 1:
        return tuple(weights)
    return replace(first, blocks=torch.cat([weight.blocks for weight in weights]))


class BlocksTriton(Head):
    """Few rows: a kernel that decodes tiles in registers. Many rows: the weight decoded in every call. `is_fixed`:
    always the kernel, with the same tiles for any number of rows."""

    def __init__(self, weight: BlockWeight, bias: Tensor | None = None, is_fixed: bool = False) -> None:
        from millrace.ops.triton.blocks import product

        self.weight, self.bias, self._is_fixed = weight, bias, is_fixed
        self.num_bytes = weight.num_bytes + (0 if bias is None else bias.nbytes)
        self._operand = product.operand(weight.kind, weight.blocks, weight.in_features)
        device = weight.blocks.device
        is_gpu = device.type == "cuda"
        self._programs = 4 * torch.cuda.get_device_properties(device).multi_processor_count if is_gpu else 1
        self._product: Any = product

    def __call__(self, x: Tensor) -> Tensor:
        return self._multiplied(x, x.dtype)

    def wide(self, x: Tensor, out: Tensor | None = None, decode: bool = False) -> Tensor:
        return self._multiplied(x, torch.float32)

    def _multiplied(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        (outputs, inputs), product = self.weight.shape, self._product
        if self._is_fixed:
            tiles = product.fixed_tiles(outputs, inputs, self._programs)
        elif x.shape[0] <= MAX_ROWS_IN_REGISTERS:
            tiles = product.choose_tiles(x.shape[0], outputs, inputs, self._programs)
        else:
            return F.linear(x, product.decode(self._operand, x.dtype), self.bias).to(dtype)
        out: Tensor = product.multiply(x, self._operand, tiles, self.bias, dtype)
        return out


def is_thin(weight: object) -> TypeGuard[BlockWeight]:
    """True if the kernels take such a weight."""
    if not isinstance(weight, BlockWeight) or weight.dtype not in (torch.bfloat16, torch.float16):
        return False
    from millrace.ops.triton.blocks import thin_planes  # slow to import

    return thin_planes.fits(weight.kind, *weight.shape)


class ThinPlanesLinear(Head):
    """Q2_K and Q3_K in planes of codes, as `block_planes.py` has it for more bits. Few rows: a kernel that makes
    numbers of codes in registers. More: the weight dequantised in every call."""

    def __init__(self, weight: BlockWeight, bias: Tensor | None = None) -> None:
        from millrace.ops.triton.blocks import thin_planes, thin_rows

        self.weight = thin_planes.pack(weight.kind, weight.blocks, weight.in_features, weight.dtype)
        self.bias = bias
        self.num_bytes = self.weight.num_bytes + (0 if bias is None else bias.nbytes)
        self._few, self._dequantise = thin_rows.multiply, thin_rows.dequantise
        self._choose, self._max_rows = thin_rows.choose_warps, thin_rows.MAX_ROWS

    def __call__(self, x: Tensor) -> Tensor:
        return self._multiply(x, x.dtype)

    def wide(self, x: Tensor, out: Tensor | None = None, decode: bool = False) -> Tensor:
        return self._multiply(x, torch.float32)

    def _multiply(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        rows = x.shape[0]
        if rows <= self._max_rows:
            return self._few(x, self.weight, self._choose(rows, self.weight), self.bias, dtype)
        return F.linear(x, self._dequantise(self.weight), self.bias).to(dtype)
