"""Checkpoints of Quark (`quant_method: quark`): FP8 with a scale per tensor or output, MXFP4.

FP8: `weight` e4m3, `weight_scale`. MXFP4: `weight` uint8 [N, K / 2], even inputs in the low halves; `weight_scale`
uint8 [N, K / 32], the exponent of two plus 127. Scales of activations are not used.
"""

from __future__ import annotations

from typing import Final

import torch

from millrace.models.formats.base import QuantisedMatrix, Settings, StoredTensors, unsupported
from millrace.models.formats.fp4 import fp4_matrix
from millrace.models.formats.fp8 import fp8_matrix

_ENDS: Final = ("weight", "weight_scale", "input_scale", "output_scale")


class QuarkFormat:
    """Modules are as their tensors say; `exclude` names those that are plain."""

    def __init__(self, _settings: Settings, tensors: StoredTensors) -> None:
        self._tensors, self._names = tensors, frozenset(tensors.names())

    def matrix(self, module: str, shape: tuple[int, int]) -> QuantisedMatrix | None:
        weight, scale = f"{module}.weight", f"{module}.weight_scale"
        if scale not in self._names:
            return None
        used = tuple(name for end in _ENDS if (name := f"{module}.{end}") in self._names)
        kinds = self._tensors.dtype(weight), self._tensors.dtype(scale)
        if kinds[0].is_floating_point and kinds[0].itemsize == 1 and kinds[1] != torch.uint8:
            return fp8_matrix(self._tensors, weight, scale, shape, None, used, "FP8")
        if kinds == (torch.uint8, torch.uint8):
            return fp4_matrix(self._tensors, weight, scale, None, shape, 32, used)
        stored = " and ".join(str(kind).removeprefix("torch.") for kind in kinds)
        raise unsupported(f"Quark with weights and scales in {stored}", "Use a checkpoint in FP8 or MXFP4.")
