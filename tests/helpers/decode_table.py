"""Decode attention tables with some limits changed, for tests that need other splits or lists than the defaults."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from millrace.ops.attention import decode_rule


def change_decode_table(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> None:
    table = replace(decode_rule.decode_table(torch.device("cpu")), **fields)
    monkeypatch.setattr(decode_rule, "decode_table", lambda _device: table)


def want_few_programs(monkeypatch: pytest.MonkeyPatch, most: int = 16) -> None:
    """Triton's interpreter runs programs one by one, also those without work."""
    table = decode_rule.decode_table(torch.device("cpu"))

    def limited(rows: decode_rule.ByStreams) -> decode_rule.ByStreams:
        return tuple((streams, (min(programs, most), *tile)) for streams, (programs, *tile) in rows)

    few = {name: limited(rows) for name, rows in table.few.items()}
    change_decode_table(monkeypatch, few=few, few_with_drafts=limited(table.few_with_drafts))
