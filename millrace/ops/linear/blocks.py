"""Writes grouped weights as GGUF blocks, which the CPU kernels read."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millrace.errors import ModelError
from millrace.ops.linear.grouped_weight import GroupedWeight

BLOCK = 32
"""Inputs of one block."""


def gguf_blocks(weight: GroupedWeight, kind: str) -> npt.NDArray[np.uint8]:
    """The weight's rows as contiguous blocks of a format of `models.formats.base.gguf_of`, in the order of the
    codes. Scales and offsets are rounded to float16."""
    outputs = weight.shape[0]
    codes = (_nibbles(weight.codes) if weight.bits == 4 else weight.codes).view(outputs, -1, BLOCK)
    if kind == "MXFP4":
        exponents = weight.scales.view(torch.uint8).unsqueeze(2)
        return torch.cat((exponents, _halves(codes)), dim=2).view(outputs, -1).numpy()
    scales = _by_block(weight.scale_rows(), weight)
    halves = [_half(scales)]
    if kind == "Q4_1":
        zeros = weight.zero if weight.zeros is None else _by_block(weight.zeros.float(), weight)
        offsets = 0 if weight.offsets is None else _by_block(weight.offsets.float(), weight)
        halves.append(_half(offsets - scales * zeros))
    if kind == "Q8_0":
        if weight.zero:
            codes = codes ^ 128
        integers = codes.view(torch.uint8)
    else:
        integers = _halves(codes)
    return torch.cat((*halves, integers), dim=2).view(outputs, -1).numpy()


def _nibbles(packed: Tensor) -> Tensor:
    return torch.stack((packed & 15, packed >> 4), dim=2).flatten(1)


def _halves(codes: Tensor) -> Tensor:
    """[..., 32] to [..., 16]: the second half of a block in the upper bits."""
    return codes[..., :16] | (codes[..., 16:] << 4)


def _by_block(by_group: Tensor, weight: GroupedWeight) -> Tensor:
    """float32 [N, blocks]"""
    return by_group.repeat_interleave(min(weight.group, weight.in_features) // BLOCK, dim=1)


def _half(values: Tensor) -> Tensor:
    """float16 as bytes, [..., 2]."""
    halves = values.to(torch.float16)
    if not bool(torch.isfinite(halves).all()):
        raise ModelError(
            "A scale of the quantised weights is above 65504, the largest float16 number, which the CPU kernels need."
            " Download the checkpoint again, or serve it on a GPU."
        )
    return halves.unsqueeze(2).view(torch.uint8)
