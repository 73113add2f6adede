"""The precision of a model's products and of everything else: what `auto` means on this machine."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from millrace.config import ModelConfig, Quantization
from millrace.errors import ConfigError
from millrace.ops.cpp.native import has_fast_int8, native_missing
from millrace.ops.cpp.targets import AMX_FEATURES, processor_features
from millrace.run.device.device import Device


@dataclass(frozen=True, slots=True)
class Precision:
    dtype: torch.dtype
    quantization: Quantization

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know about it."""
        if self.quantization != "int8":
            return ()
        return ("Quantised weights are multiplied with activations rounded to INT8 (--dtype float32: exact products).",)


def choose_precision(settings: ModelConfig, device: Device, has_quantised_weights: bool) -> Precision:
    """`has_quantised_weights`: the model's files have matrices that the CPU kernels read (GGUF, AWQ, GPTQ, …)."""
    quantization: Quantization = "none" if settings.quantization == "auto" else settings.quantization
    if quantization == "int8" and device.kind == "cpu":
        _check_int8(has_quantised_weights, native_missing(device.torch_device))
    if settings.quantization == "auto" and settings.dtype == "auto" and has_quantised_weights and prefers_int8(device):
        quantization = "int8"
    if settings.dtype != "auto":
        return Precision(getattr(torch, settings.dtype), quantization)
    return Precision(torch.float32 if quantization == "int8" else device.defaults.dtype, quantization)


def _check_int8(has_quantised_weights: bool, kernels_missing: str) -> None:
    """Raise ConfigError if no weight of the model would be multiplied in INT8."""
    if not has_quantised_weights:
        raise ConfigError(
            "model.quantization is int8, but this model has no weights in a quantised format that the CPU kernels read."
            " Set --quantization auto, or serve a quantised GGUF file or a checkpoint of 4- or 8-bit integers.",
            param="model.quantization",
        )
    if kernels_missing:
        raise ConfigError(
            f"model.quantization is int8, which needs the C++ kernels, but Millrace {kernels_missing}. Set"
            " --quantization auto.",
            param="model.quantization",
        )


def encodes_in_int8(settings: ModelConfig, device: Device, dtype: torch.dtype) -> bool:
    """Whether an encoder, whose weights are floats, multiplies in INT8."""
    if settings.quantization != "int8":
        return False
    missing = native_missing(device.torch_device)
    if device.kind != "cpu" or dtype != torch.float32 or missing:
        why = f"Millrace {missing}" if missing else f"this is {dtype} on {device.kind}"
        raise ConfigError(
            f"--quantization int8 needs an encoder in float32 on a CPU and the C++ kernels, but {why}."
            " Set --quantization none.",
            param="model.quantization",
        )
    return True


def prefers_int8(device: Device) -> bool:
    """Whether products of integers are the fastest for quantised weights: on a CPU with instructions for them, unless
    it has AMX, whose bfloat16 kernels unpack them for less."""
    return device.kind == "cpu" and not processor_features() & AMX_FEATURES and has_fast_int8()
