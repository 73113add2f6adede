"""What an idle engine does about garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from millrace.host.idle_memory import SettledGarbage


@pytest.fixture
def _thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("_thawed")
@pytest.mark.parametrize("frozen_before", [False, True])
def test_what_the_start_left_is_looked_through_once(frozen_before: bool) -> None:
    if frozen_before:  # as some interpreters begin
        gc.freeze()
    left_by_the_start = [[index] for index in range(10_000)]
    settle = SettledGarbage()
    settle()
    assert not set(map(id, left_by_the_start)) & set(map(id, gc.get_objects()))
    came_later = [[index] for index in range(10)]
    settle()
    assert set(map(id, came_later)) <= set(map(id, gc.get_objects()))


@pytest.mark.usefixtures("_thawed")
def test_garbage_that_came_since_is_found() -> None:
    settle = SettledGarbage()
    settle()
    cycle: list[object] = ["to be found"]
    cycle.append(cycle)
    found = id(cycle)
    del cycle
    settle()
    assert found not in set(map(id, gc.get_objects()))
