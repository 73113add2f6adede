"""Adapters that rank 0 filled a slot with, on a rank that no longer finds their files."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.errors import AdapterError
from millrace.run.ranks.recorder import SlotFill
from millrace.run.ranks.slot_fills import fill_as_recorded


@pytest.mark.parametrize("is_gone", ["directory", "weights"])
def test_an_adapter_whose_files_are_gone_is_named(tmp_path: Path, is_gone: str) -> None:
    folder = tmp_path / "pirate"
    if is_gone == "weights":
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    runner: Any = SimpleNamespace(slots=SimpleNamespace(targets=None, dtype=None))
    with pytest.raises(AdapterError, match="pirate"):
        fill_as_recorded(runner, SlotFill(1, str(folder), "digest"))
