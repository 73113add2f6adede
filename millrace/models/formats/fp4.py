"""Matrices of 4-bit floats (e2m1): MXFP4, with a power of two for each 32 inputs, and NVFP4, with an FP8 scale for each
16 inputs and a number for all."""

from __future__ import annotations

from typing import Final

import torch

from millrace.models.formats.base import QuantisedMatrix, StoredTensors, check_shape, items
from millrace.ops.linear.grouped_weight import GroupedWeight

E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of the 16 codes of 4-bit floats."""


def fp4_matrix(
    tensors: StoredTensors,
    codes: str,
    scale: str,
    whole: str | None,
    shape: tuple[int, int],
    group: int,
    used: tuple[str, ...],
    *,
    is_divisor: bool = False,
) -> QuantisedMatrix:
    """`whole`: the tensor with the number for all of NVFP4; None for MXFP4. `is_divisor`: scales are divided by it."""
    outputs, inputs = shape
    check_shape(tensors, codes, (outputs, inputs // 2))
    check_shape(tensors, scale, (outputs, inputs // group))

    def read(dtype: torch.dtype) -> GroupedWeight:
        scales, output_scales = tensors.raw(scale), None
        if whole is not None:
            number = tensors.raw(whole).float().reshape(1)
            output_scales = (1 / number if is_divisor else number).expand(outputs).contiguous()
        return GroupedWeight(
            codes=tensors.raw(codes),
            scales=scales.view(torch.float8_e8m0fnu) if whole is None else scales,
            in_features=inputs,
            group=group,
            dtype=dtype,
            levels=torch.tensor(E2M1),
            output_scales=output_scales,
        )

    return QuantisedMatrix(
        label=f"{'MXFP4' if whole is None else 'NVFP4'}, groups of {group}",
        shape=shape,
        tensors=used,
        num_bytes=items(shape) // 2 + items(shape) // group + (0 if whole is None else 4 * outputs),
        read=read,
        gguf="MXFP4" if whole is None and group == 32 else None,
    )
