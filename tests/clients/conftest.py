"""These tests need a running server and packages of their own: `make test-clients` sets both up."""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return None if os.environ.get("MILLRACE_URL") else True


@pytest.fixture(scope="session")
def model() -> str:
    with urllib.request.urlopen(f"{os.environ['MILLRACE_URL']}/v1/models", timeout=10) as answer:
        name: str = json.load(answer)["data"][0]["id"]
        return name
