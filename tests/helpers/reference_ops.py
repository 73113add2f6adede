"""Attention and cache writes by the reference versions, which support every cache format on any device."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.models import builder
from millrace.ops import registry
from millrace.ops.base.version import Choice


def use_reference_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(op: str, *args: Any, **shape: Any) -> Choice:
        if op in ("attention", "qkv"):
            return Choice(registry.OPS[op][-1], ())
        return registry.choose(op, *args, **shape)

    monkeypatch.setattr(builder, "choose", chosen)
