"""Requests with an adapter and the slots on the device: who waits, who gives way, and how much memory they may take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from millrace.engine.adapters.requests import AdaptedRequests
from millrace.engine.adapters.service import EngineAdapters
from millrace.engine.adapters.store import AdapterStore
from millrace.engine.figures.shares import Shares
from millrace.errors import AdapterError
from millrace.link.messages import Query
from millrace.models.adapters.read import Adapter
from millrace.params import SamplingParams
from millrace.plan.request import Request


class Device:
    """Copies end when a test says so."""

    def __init__(self) -> None:
        self.held: dict[int, Adapter | None] = {}
        self.copies_end = True

    def fill(self, slot: int, adapter: Adapter | None) -> Any:
        def is_ready() -> bool:
            if self.copies_end or adapter is None:
                self.held[slot] = adapter
            return self.held.get(slot) is adapter

        return is_ready

    @property
    def num_bytes(self) -> int:
        return sum(adapter.num_bytes for adapter in self.held.values() if adapter is not None)


def read(folder: Path) -> Adapter:
    """An adapter of as many bytes as its name says."""
    data = torch.zeros(int(folder.name), dtype=torch.uint8)
    return Adapter(data, {}, 4, folder.name.encode().hex(), "", folder)


class World:
    def __init__(self, num_slots: int, max_bytes: int | None) -> None:
        self.device, self.store = Device(), AdapterStore(read, 1 << 20)
        self.requests = AdaptedRequests(self.store, num_slots, self.device.fill, lambda: 0.0, max_bytes)
        self._next = 0

    def ask(self, size: int) -> int:
        """The id of a request for the adapter of that size, whose files are read at once."""
        known = self.store.declare(str(size), Path(f"/{size}"))
        self._next += 1
        request = Request(id=self._next, prompt=np.zeros(1, np.int32), max_tokens=1)
        if not self.requests.hold(request, SamplingParams(adapter=str(size))):
            self.ready = [self._next]
            return self._next
        if self.store.loads(known):
            self.store.run(lambda: None).result(30)
            self.requests.note_loaded(self.store.take_done())
        self.advance()
        return self._next

    def advance(self) -> list[int]:
        self.ready = [request.id for request, _ in self.requests.take_ready()]
        return self.ready


@pytest.fixture
def world() -> Any:
    made: list[World] = []

    def make(num_slots: int = 4, max_bytes: int | None = None) -> World:
        made.append(World(num_slots, max_bytes))
        return made[-1]

    yield make
    for one in made:
        one.store.close()


def test_a_request_waits_for_the_end_of_its_adapters_copy(world: Any) -> None:
    own = world(num_slots=1)
    own.device.copies_end = False
    first = own.ask(10)
    second = own.ask(20)
    assert (own.ready, own.requests.is_loading, own.requests.digests) == ([], True, frozenset())
    own.device.copies_end = True
    assert own.advance() == [first], "a slot that is being filled does not give way to another adapter"
    assert own.advance() == []
    own.requests.close(first)
    assert own.advance() == [second]
    assert not own.requests.is_loading


def test_a_copy_that_nobody_waits_for_any_more_ends_too(world: Any) -> None:
    own = world()
    own.device.copies_end = False
    own.requests.drop(own.ask(10))
    assert own.requests.has_waiting
    own.device.copies_end = True
    assert own.advance() == []
    assert not own.requests.has_waiting


def test_adapters_give_way_to_keep_within_the_devices_memory(world: Any) -> None:
    own = world(num_slots=4, max_bytes=100)
    first, second = own.ask(40), own.ask(50)
    third = own.ask(60)
    assert own.ready == [], "both are in use"
    own.requests.close(first)
    assert own.advance() == [], "what is not used is too little"
    assert own.device.num_bytes == 90, "nothing gives way in vain"
    own.requests.close(second)
    assert own.advance() == [third]
    assert own.device.num_bytes <= 100


def test_an_adapter_larger_than_the_devices_share_is_refused_also_when_it_is_known(world: Any) -> None:
    own = world(num_slots=4, max_bytes=100)
    for _ in range(2):
        number = own.ask(101)
        failed = own.requests.take_failed()
        assert [one.request_id for one in failed] == [number]
        assert "101 bytes, and the device has 100 for all adapters. Raise --max-adapters" in failed[0].message


def damaged(folder: Path) -> Adapter:
    raise AdapterError(f"{folder} is damaged.")


def request_of(number: int) -> Request:
    return Request(id=number, prompt=np.zeros(1, np.int32), max_tokens=1)


def test_a_failed_request_can_be_ended_by_its_id_and_is_not_tried_again() -> None:
    store = AdapterStore(damaged, 1 << 20)
    bad = store.declare("bad", Path("/secret/bad"))
    requests = AdaptedRequests(store, 2, lambda slot, adapter: lambda: True)
    assert requests.hold(request_of(1), SamplingParams(adapter="bad"))
    assert requests.hold(request_of(2), SamplingParams(adapter="absent"))
    store.close()  # Waits for the thread.
    requests.note_loaded(store.take_done())
    assert requests.take_ready() == []
    failed = {one.request_id: one.message for one in requests.take_failed()}
    assert sorted(failed) == [1, 2]
    assert "'bad' cannot be used" in failed[1]
    assert "/secret" not in failed[1]
    assert "/secret" in bad.failure
    for number in (1, 2):
        ended = requests.drop(number)
        assert ended is not None
        assert ended.id == number
        assert requests.drop(number) is None


def test_a_removal_is_answered_after_fronts_can_be_told(world: Any) -> None:
    own = world()
    own.ask(10)
    adapters = EngineAdapters(own.requests, Shares)
    assert adapters.names() == ("10",)
    assert adapters.answer(Query(1, 7, "drop_adapter", "10")) is None, "its loop tells the names before `advance`'s"
    assert adapters.changed_names() == ()
    ((front, reply),) = adapters.advance(0.0)
    assert (front, reply.query_id) == (1, 7)
    assert not adapters.advance(0.0)
