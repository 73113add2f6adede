"""What `auto` means for the dtype and for quantised weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from millrace.config import ModelConfig
from millrace.errors import ConfigError
from millrace.run.device import device as device_module
from millrace.run.device import precision as module
from millrace.run.device.defaults import CUDA_DEFAULTS
from millrace.run.device.device import CpuDevice
from millrace.run.device.precision import choose_precision

XEON = {"avx512f", "avx512_vnni"}
AMX = {*XEON, "avx512_bf16", "amx_bf16"}
F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("kind", "features", "settings", "is_quantised", "expected"),
    [
        ("cpu", XEON, {}, True, (F32, "int8")),
        ("cpu", XEON, {}, False, (F32, "none")),
        ("cpu", XEON, {"dtype": "float32"}, True, (F32, "none")),
        ("cpu", XEON, {"dtype": "bfloat16"}, True, (BF16, "none")),
        ("cpu", XEON, {"quantization": "none"}, True, (F32, "none")),
        ("cpu", {"asimddp"}, {}, True, (F32, "int8")),
        ("cpu", {"asimd"}, {}, True, (F32, "none")),
        ("cpu", {"asimddp", "bf16", "i8mm"}, {}, True, (F32, "int8")),
        ("cpu", AMX, {}, True, (BF16, "none")),
        ("cpu", AMX, {"quantization": "int8"}, True, (F32, "int8")),
        ("cpu", AMX, {"dtype": "float32", "quantization": "int8"}, True, (F32, "int8")),
        ("cuda", XEON, {}, True, (BF16, "none")),
        ("cuda", XEON, {"quantization": "fp8"}, True, (BF16, "fp8")),
    ],
)
def test_precision(
    kind: str,
    features: set[str],
    settings: dict[str, Any],
    is_quantised: bool,
    expected: tuple[torch.dtype, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "has_fast_int8", lambda: bool(features & {"avx512f", "asimddp"}))
    for owner in (device_module, module):
        monkeypatch.setattr(owner, "processor_features", lambda: frozenset(features))
    device: Any = SimpleNamespace(kind=kind, defaults=CUDA_DEFAULTS) if kind == "cuda" else CpuDevice(1)
    found = choose_precision(ModelConfig(**settings), device, is_quantised)
    assert (found.dtype, found.quantization) == expected
    assert bool(found.notes) == (found.quantization == "int8")


@pytest.mark.parametrize(("is_quantised", "missing", "reason"), [(False, "", "GGUF"), (True, "needs g++", "needs g++")])
def test_int8_that_would_change_nothing_is_refused(
    is_quantised: bool, missing: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "native_missing", lambda device: missing)
    device: Any = SimpleNamespace(kind="cpu", torch_device=torch.device("cpu"))
    with pytest.raises(ConfigError, match=reason):
        choose_precision(ModelConfig(quantization="int8"), device, is_quantised)
