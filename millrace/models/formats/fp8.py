"""FP8 checkpoints (`quant_method: fp8` or `fbgemm_fp8`): float8_e4m3fn weights with a scale per
tensor, per output or per block.

Weights are `weight`; scales are `weight_scale_inv` (blocks of 128 x 128, by which the stored number is multiplied) or
`weight_scale`. Activation scales are not used: where activations are rounded to FP8, each token has its own scale.
"""

from __future__ import annotations

from functools import partial

import torch

from millrace.errors import ModelError
from millrace.models.formats.base import (
    QuantisedMatrix,
    Settings,
    StoredTensors,
    check_shape,
    is_named,
    items,
    unsupported,
)
from millrace.ops.linear.grouped_weight import GroupedWeight

FP8 = torch.float8_e4m3fn
OTHER_FP8 = (torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


class Fp8Format:
    def __init__(self, settings: Settings, tensors: StoredTensors) -> None:
        if settings.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
            raise unsupported(f"FP8 of the type {settings['fmt']}", "Use a checkpoint in e4m3.")
        self._tensors, self._names = tensors, frozenset(tensors.names())
        self._block = settings.get("weight_block_size")
        skipped = settings.get("modules_to_not_convert"), settings.get("ignored_layers")
        self._plain = tuple(name for names in skipped for name in names or ())

    def matrix(self, module: str, shape: tuple[int, int]) -> QuantisedMatrix | None:
        weight = f"{module}.weight"
        if weight not in self._names or not self._tensors.dtype(weight).is_floating_point:
            return None
        if self._tensors.dtype(weight).itemsize > 1:
            return None
        scale = next((name for end in ("_scale_inv", "_scale") if (name := weight + end) in self._names), None)
        if scale is None:
            raise ModelError(f"{self._tensors.file_of(weight)}: tensor {weight} is FP8 but has no scale.")
        if is_named(module, self._plain):
            raise ModelError(
                f"{self._tensors.file_of(weight)}: tensor {weight} is FP8, but modules_to_not_convert names it."
                " The config and the weights belong to different models; download both again."
            )
        rest = (f"{module}.{end}" for end in ("input_scale", "activation_scale", "input_scale_ub"))
        used = (weight, scale, *(name for name in rest if name in self._names))
        return fp8_matrix(self._tensors, weight, scale, shape, self._block, used, "FP8")


def fp8_matrix(
    tensors: StoredTensors,
    weight: str,
    scale: str,
    shape: tuple[int, int],
    block: tuple[int, int] | None,
    used: tuple[str, ...],
    label: str,
) -> QuantisedMatrix:
    """A matrix of FP8 numbers. `block`: outputs and inputs per scale; None if per tensor or output."""
    if tensors.dtype(weight) in OTHER_FP8:
        raise unsupported(f"{tensors.dtype(weight)} weights".removeprefix("torch."), "Use a checkpoint in e4m3.")
    check_shape(tensors, weight, shape)
    outputs, inputs = shape
    if block is None:
        if items(tensors.shape(scale)) not in (1, outputs):
            check_shape(tensors, scale, (outputs, 1))
        is_whole = items(tensors.shape(scale)) == 1
        return QuantisedMatrix(
            label=f"{label}, a scale per {'tensor' if is_whole else 'output'}",
            shape=shape,
            tensors=used,
            num_bytes=outputs * (inputs + 4),
            read=partial(_read_by_output, tensors, weight, scale, shape),
            is_fp8_by_output=True,
        )
    rows, group = block
    check_shape(tensors, scale, (-(-outputs // rows), -(-inputs // group)))
    return QuantisedMatrix(
        label=f"{label}, blocks of {rows} × {group}",
        shape=shape,
        tensors=used,
        num_bytes=outputs * inputs + items(tensors.shape(scale)) * tensors.dtype(scale).itemsize,
        read=partial(_read_blocks, tensors, weight, scale, (rows, group)),
    )


def _read_by_output(
    tensors: StoredTensors, weight: str, scale: str, shape: tuple[int, int], dtype: torch.dtype
) -> GroupedWeight:
    """One scale per output, also where one is stored for all: parts of a fused matrix have different ones."""
    outputs, inputs = shape
    scales = tensors.raw(scale).float().reshape(-1, 1).expand(outputs, 1).contiguous()
    return GroupedWeight(tensors.raw(weight), scales, inputs, inputs, dtype)


def _read_blocks(
    tensors: StoredTensors, weight: str, scale: str, block: tuple[int, int], dtype: torch.dtype
) -> GroupedWeight:
    codes = tensors.raw(weight)
    return GroupedWeight(codes, tensors.raw(scale), codes.shape[1], block[1], dtype, rows_per_scale=block[0])
