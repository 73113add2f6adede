from __future__ import annotations

import asyncio

import pytest

from millrace.link.front import kv_listeners
from millrace.link.front.kv_listeners import KvListeners
from millrace.link.messages import KvEvents


def event(kind: str, *names: bytes, tier: str = "device") -> KvEvents:
    return KvEvents(kind, tier, b"".join(name.ljust(8) for name in names))  # type: ignore[arg-type]


def test_a_slow_listener_loses_its_events_and_gets_a_snapshot_when_it_reads_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_listeners, "MAX_QUEUED_KEYS", 4)
    asked: list[bool] = []

    async def run() -> list[KvEvents]:
        listeners = KvListeners(asked.append)
        slow = listeners.add()
        listeners.on_events(event("filled", b"early"))
        listeners.on_events(event("snapshot", b"a"))
        for number in range(1000):
            listeners.on_events(event("filled", b"%d" % number))
        assert asked == [True], "nothing is asked for before it reads"
        read = [await slow.next()]
        assert asked == [True, True]
        listeners.on_events(event("filled", b"lost"))
        listeners.on_events(event("snapshot", b"b"))
        listeners.on_events(event("evicted", b"b"))
        read += [await slow.next(), await slow.next()]
        listeners.remove(slow)
        return read

    assert asyncio.run(run()) == [kv_listeners.CLEARED, event("snapshot", b"b"), event("evicted", b"b")]
    assert asked == [True, True, False]


def test_a_new_engine_clears_what_listeners_have_and_is_asked() -> None:
    asked: list[bool] = []

    async def run() -> None:
        listeners = KvListeners(asked.append)
        first, second = listeners.add(), listeners.add()
        listeners.on_events(event("snapshot", b"a"))
        listeners.on_events(event("snapshot", b"a"))
        assert (await first.next(), first.queue) == (event("snapshot", b"a"), first.queue)
        assert not first.queue, "a snapshot for another listener"
        listeners.on_new_engine()
        assert [await first.next(), await second.next()] == [kv_listeners.CLEARED] * 2

    asyncio.run(run())
    assert asked == [True] * 4
