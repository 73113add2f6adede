"""Decode steps over a cache of random content, on a GPU."""

from __future__ import annotations

import pytest

from millrace.bench.gpu.long_steps import LongSteps
from millrace.bench.gpu.models import known_shapes


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [1, 4])
def test_a_step_takes_longer_than_its_bytes(queries: int) -> None:
    steps = LongSteps(known_shapes()["smollm2-135m"], "auto", max_tokens=4096)
    found = steps.measure(2, 1000, queries)
    assert found is not None
    assert found.ms > found.floor_ms > 0
    assert steps.measure(8, 1000, queries) is None, "no room in the cache"
