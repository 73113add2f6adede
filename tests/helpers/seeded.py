"""Hooks for a conftest: every test draws the same random tensors, alone or after others.

Fixtures are seeded apart from the test: one that is shared is made only once.
"""

from __future__ import annotations

import pytest
import torch


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    torch.manual_seed(1)
