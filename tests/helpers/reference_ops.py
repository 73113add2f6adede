"""Attention and cache writes by the versions that define them, which know every format of the cache on any device."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.models import load
from millrace.ops import registry
from millrace.ops.version import Choice


def use_reference_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(op: str, *args: Any, **shape: Any) -> Choice:
        if op in ("attention", "qkv"):
            return Choice(registry.OPS[op][-1], ())
        return registry.choose(op, *args, **shape)

    monkeypatch.setattr(load, "choose", chosen)
