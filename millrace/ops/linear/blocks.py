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
    scales = _by_block(weight.scale_rows(), weight)
    halves = [_half(scales)]
    if kind == "Q4_1":
        zeros = weight.zero if weight.zeros is None else _by_block(weight.zeros.float(), weight)
        offsets = 0 if weight.offsets is None else _by_block(weight.offsets.float(), weight)
        halves.append(_half(offsets - scales * zeros))
    elif kind == "Q5_0":
        return _five_bits(weight, codes, scales)
    if kind == "Q8_0":
        if weight.zero:
            codes = codes ^ 128
        integers = codes.view(torch.uint8)
    else:
        integers = codes[..., :16] | (codes[..., 16:] << 4)
    return torch.cat((*halves, integers), dim=2).view(outputs, -1).numpy()


def _nibbles(packed: Tensor) -> Tensor:
    return torch.stack((packed & 15, packed >> 4), dim=2).flatten(1)


def _five_bits(weight: GroupedWeight, codes: Tensor, scales: Tensor) -> npt.NDArray[np.uint8]:
    """Levels that are multiples of a half, from -8 to 7.5, as integers from 0 to 31."""
    assert weight.levels is not None
    integers = (2 * weight.levels + 16).to(torch.uint8)[codes.int()]
    low = (integers[..., :16] & 15) | ((integers[..., 16:] & 15) << 4)
    upper = torch.from_numpy(np.packbits((integers >> 4).numpy(), axis=2, bitorder="little"))
    return torch.cat((_half(scales / 2), upper, low), dim=2).view(weight.shape[0], -1).numpy()


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
