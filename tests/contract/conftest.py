"""A GPU run (`-m gpu`) skips this folder: it has no GPU tests, and a GPU host may lack the client packages."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if config.getoption("markexpr") == "gpu" else None
