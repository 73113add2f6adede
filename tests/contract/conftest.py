"""Clients of other makers, which a host with a GPU need not have: no test of that kind is here."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if config.getoption("markexpr") == "gpu" else None
