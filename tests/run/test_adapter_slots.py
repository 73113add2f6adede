"""Filling a slot on a device that has no memory left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.errors import DeviceFull
from millrace.models.adapters.read import Adapter
from millrace.run.device.adapter_slots import room_for


def test_a_full_device_refuses_the_adapter_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    adapter = Adapter(torch.zeros(1024), {}, 4, "00", "", Path())
    assert room_for(adapter, torch.device("cpu")).shape == (1024,)
    monkeypatch.setattr(torch, "empty_like", full)
    with pytest.raises(DeviceFull, match="it has 4,096 bytes, for which the device has no memory left"):
        room_for(adapter, torch.device("cpu"))
