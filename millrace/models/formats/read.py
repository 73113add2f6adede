"""Finds the format of a checkpoint by its `quantization_config`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from millrace.errors import ModelError
from millrace.models.formats.awq import AwqFormat
from millrace.models.formats.base import CheckpointFormat, Settings, StoredTensors, unsupported
from millrace.models.formats.bitsandbytes import BitsAndBytesFormat
from millrace.models.formats.compressed_tensors import CompressedTensorsFormat
from millrace.models.formats.fp8 import Fp8Format
from millrace.models.formats.gptq import GptqFormat
from millrace.models.formats.hqq import HqqFormat
from millrace.models.formats.modelopt import ModelOptFormat
from millrace.models.formats.mxfp4 import Mxfp4Format
from millrace.models.formats.quark import QuarkFormat
from millrace.models.formats.torchao import TorchAoFormat

_FORMATS: Final[Mapping[str, Callable[[Settings, StoredTensors], CheckpointFormat]]] = {
    "fp8": Fp8Format,
    "fbgemm_fp8": Fp8Format,
    "compressed-tensors": CompressedTensorsFormat,
    "awq": AwqFormat,
    "gptq": GptqFormat,
    "bitsandbytes": BitsAndBytesFormat,
    "torchao": TorchAoFormat,
    "mxfp4": Mxfp4Format,
    "modelopt": ModelOptFormat,
    "modelopt_fp4": ModelOptFormat,
    "quark": QuarkFormat,
    "hqq": HqqFormat,
}


def format_of(config: Mapping[str, Any], tensors: StoredTensors) -> CheckpointFormat | None:
    """The format of a checkpoint with this config.json; None if it is not quantised."""
    settings = config.get("quantization_config")
    if not settings:
        return None
    if not isinstance(settings, Mapping):
        raise ModelError(f"quantization_config is {settings!r} instead of an object. Download config.json again.")
    method = settings.get("quant_method")
    make = _FORMATS.get(str(method))
    if make is None:
        raise unsupported(f"'{method}'", f"Supported: {', '.join(_FORMATS)}, or a GGUF file.")
    try:
        return make(settings, tensors)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ModelError(
            f"quantization_config of the method {method} cannot be read: {error!r}. Download config.json again."
        ) from error
