"""tools/prove_suite.py tells green runs from red ones, and what ran beside them has ended."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.live
TOOL = Path(__file__).parents[1] / "tools" / "prove_suite.py"

LOG = """── tests: without servers, clocks and browsers, 2 at a time
── parallel: 10 passed, 1 failed, 2 skipped, 0 passed on the second try, 5 min 3 s
FAILED tests/plan/test_x.py::test_y
    assert 1 == 2
── live: 5 passed, 0 failed, 0 skipped, 1 passed on the second try, 0 min 9 s
RERUN tests/serve/test_z.py::test_w
1 passed on the second try: find out why, from the first failure above.
15 passed, 1 failed, 2 skipped
"""


@pytest.fixture(scope="module")
def tool() -> Iterator[Any]:
    spec = importlib.util.spec_from_file_location("prove_suite", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dataclasses look for their module there.
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_a_log_is_read(tool: Any) -> None:
    found = tool.outcome_of(LOG, 1, 312.4)
    names = ("tests/plan/test_x.py::test_y", "tests/serve/test_z.py::test_w")
    parts = (("parallel", "5 min 3 s"), ("live", "0 min 9 s"))
    assert found == tool.Outcome(1, 312.4, 15, 1, 2, 1, parts, names)
    lines = tool.table_of([found]).splitlines()
    assert "red" in lines[1]
    assert "5 min 12 s" in lines[1]
    assert lines[2:] == [f"run 1: {name}" for name in names]


def test_only_a_run_without_failures_and_second_tries_is_green(tool: Any) -> None:
    green = "5 passed, 0 failed, 0 skipped\n"
    assert tool.outcome_of(green, 0, 1.0).is_green
    assert not tool.outcome_of(green, 1, 1.0).is_green
    assert not tool.outcome_of(LOG, 0, 1.0).is_green
    assert not tool.outcome_of("", 0, 1.0).is_green, "a run without a result"


def test_a_run_with_busy_cores_and_less_memory(tool: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('3 passed, 0 failed, 1 skipped')"]
    found = tool.run(command, tmp_path, tmp_path / "log", busy=True, less_memory=2**20)
    assert found.is_green
    assert (found.passed, found.skipped) == (3, 1)
