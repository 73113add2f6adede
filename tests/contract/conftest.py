"""One server with the default model for all files here that need no other.

A GPU run (`-m gpu`) skips this folder: it has no GPU tests, and a GPU host may lack the client packages.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from contract.real_server import RealServer, kv_used, real_server
from serve.wire import eventually, get


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if config.getoption("markexpr") == "gpu" else None


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    options = ("--quantization", "int8", "--kv-tokens", "32768", "--max-context", "4096")
    with real_server(*options, "--data-dir", str(tmp_path_factory.mktemp("data"))) as running:
        yield running
        # After all tests no request runs and no block is in use.
        eventually(lambda: kv_used(running) == 0)
        assert get(running.port, "/ready").status == 200
