from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.quick_interpreter import quick_interpreter


@pytest.fixture(autouse=True, scope="module")
def _quick_interpreter(request: pytest.FixtureRequest) -> Iterator[None]:
    """For files whose kernels run in Triton's interpreter, see `helpers.triton_mode`."""
    if getattr(request.module, "interpreted", False):
        with quick_interpreter():
            yield
    else:
        yield
