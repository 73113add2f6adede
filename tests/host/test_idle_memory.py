"""Garbage collection of an idle engine."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from millrace.host.idle_memory import IdleCollector


@pytest.fixture
def _thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("_thawed")
@pytest.mark.parametrize("frozen_before", [False, True])
def test_objects_of_the_start_are_collected_once_and_frozen(frozen_before: bool) -> None:
    if frozen_before:  # as some interpreters begin
        gc.freeze()
    left_by_the_start = [[index] for index in range(10_000)]
    settle = IdleCollector()
    settle()
    assert not set(map(id, left_by_the_start)) & set(map(id, gc.get_objects()))
    came_later = [[index] for index in range(10)]
    settle()
    assert set(map(id, came_later)) <= set(map(id, gc.get_objects()))


@pytest.mark.usefixtures("_thawed")
def test_later_garbage_is_collected() -> None:
    settle = IdleCollector()
    settle()
    cycle: list[object] = ["to be found"]
    cycle.append(cycle)
    found = id(cycle)
    del cycle
    settle()
    assert found not in set(map(id, gc.get_objects()))
