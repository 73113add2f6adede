"""What a GPU is asked to do: its compute capability, or a lower one that the environment sets."""

from __future__ import annotations

import pytest
import torch

from millrace.config.environment import CAPABILITY_VARIABLE, cuda_capability_limit
from millrace.errors import ConfigError
from millrace.ops.base import capability as module
from millrace.ops.base.capability import capability, gpu_notes, gpu_paths
from millrace.ops.linear.fp8 import fp8_missing

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(module, "highest_assumed", cuda_capability_limit)


def test_a_limit_switches_off_what_later_gpus_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CAPABILITY_VARIABLE, raising=False)
    assert capability(CUDA) == (9, 0)
    assert "warpgroup instructions and measured" in gpu_paths(CUDA)
    monkeypatch.setenv(CAPABILITY_VARIABLE, "8.0")
    assert capability(CUDA) == (8, 0)
    assert "8.9" in fp8_missing(CUDA)
    assert "limited; the GPU has 9.0" in gpu_paths(CUDA)
    assert "no warpgroup instructions, FP8 weights are dequantised" in gpu_notes(CUDA)[0]
    assert gpu_notes(torch.device("cpu")) == ()
    monkeypatch.setenv(CAPABILITY_VARIABLE, "12.0")
    assert capability(CUDA) == (9, 0)


def test_another_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CAPABILITY_VARIABLE, "ampere")
    with pytest.raises(ConfigError, match=r"such as 8\.0"):
        cuda_capability_limit()
