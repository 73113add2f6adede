"""Checkpoints of ModelOpt (`quant_method: modelopt`, or `hf_quant_config.json` beside config.json): FP8 with a scale
per tensor or output, NVFP4.

FP8: `weight` e4m3, `weight_scale`. NVFP4: `weight` uint8 [N, K / 2], even inputs in the low halves; `weight_scale` e4m3
[N, K / 16]; `weight_scale_2`, a number for all. Scales of activations are not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Any, Final

import torch

from millrace.errors import ModelError
from millrace.models.formats.base import QuantisedMatrix, Settings, StoredTensors, is_named, unsupported
from millrace.models.formats.fp4 import fp4_matrix
from millrace.models.formats.fp8 import fp8_matrix

_ALGORITHMS: Final = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION")
_ENDS: Final = ("weight", "weight_scale", "weight_scale_2", "input_scale")


class ModelOptFormat:
    def __init__(self, settings: Settings, tensors: StoredTensors) -> None:
        own: Mapping[str, Any] = settings.get("quantization") or settings
        algorithm = str(own.get("quant_algo", "")).upper()
        if algorithm not in _ALGORITHMS:
            raise unsupported(f"ModelOpt's {algorithm or 'unnamed algorithm'}", "Use a checkpoint in FP8 or NVFP4.")
        self._tensors, self._names = tensors, frozenset(tensors.names())
        self._plain = tuple(own.get("exclude_modules") or own.get("ignore") or ())

    def matrix(self, module: str, shape: tuple[int, int]) -> QuantisedMatrix | None:
        weight, scale, whole = (f"{module}.{end}" for end in _ENDS[:3])
        if scale not in self._names:
            return None
        if f"{module}.pre_quant_scale" in self._names:
            raise unsupported("ModelOpt's AWQ (pre_quant_scale)", "Use a checkpoint in FP8 or NVFP4 without it.")
        if is_named(module, self._plain) or any(fnmatch(module, pattern) for pattern in self._plain):
            raise ModelError(
                f"{self._tensors.file_of(weight)}: tensor {weight} is quantised, but the settings exclude it."
                " The settings and the weights belong to different models; download both again."
            )
        used = tuple(name for end in _ENDS if (name := f"{module}.{end}") in self._names)
        if self._tensors.dtype(weight) == torch.uint8:
            if whole not in used:
                raise unsupported("ModelOpt's MXFP4", "Use a checkpoint in FP8 or NVFP4.")
            return fp4_matrix(self._tensors, weight, scale, whole, shape, 16, used)
        return fp8_matrix(self._tensors, weight, scale, shape, None, used, "FP8")
