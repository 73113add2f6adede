"""Slots of adapters on the device: what gives way is emptied wherever the steps are run again."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from millrace.engine.adapters.slots import DeviceSlots


def adapter(digest: str, num_bytes: int) -> Any:
    return SimpleNamespace(digest=digest, num_bytes=num_bytes, max_rank=8, qkv_alone=False)


def test_an_emptied_slot_is_told_to_those_who_follow_before_it_is_filled_again() -> None:
    """A fill is recorded when it is asked whether it is ready."""
    recorded: list[tuple[int, str | None]] = []

    def fill(slot: int, given: Any) -> Callable[[], bool]:
        def is_ready() -> bool:
            recorded.append((slot, None if given is None else given.digest))
            return True

        return is_ready

    store: Any = SimpleNamespace(pin=lambda _: None, unpin=lambda _: None)
    slots = DeviceSlots(store, 2, fill, max_bytes=10)
    assert slots.give("one", adapter("a", 6), 0.0) is not None
    assert slots.give("two", adapter("b", 6), 1.0) is not None
    assert recorded == [(1, "a"), (1, None), (1, "b")]
