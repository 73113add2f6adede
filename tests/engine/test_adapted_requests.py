"""Requests with an adapter and the slots on the device: who waits, who gives way, and how much memory they may take."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from helpers.fake_channel import FakeChannel
from helpers.fake_runner import FakeDevice, FakeRunner, run_engine

from millrace.engine.adapters.requests import LIMIT_S, MAX_PASSED_S, AdaptedRequests
from millrace.engine.adapters.service import EngineAdapters
from millrace.engine.adapters.store import AdapterStore
from millrace.engine.figures.shares import Shares
from millrace.engine.loop import Engine
from millrace.engine.parts import EngineParts
from millrace.errors import AdapterError, DeviceFull
from millrace.link.engine_stats import GrammarStats
from millrace.link.messages import NewRequest, Query, pack_tokens
from millrace.models.adapters.read import Adapter
from millrace.ops.lora.weights import LoraPart, join, pack
from millrace.params.grammar import Grammar
from millrace.params.sampling import SamplingParams
from millrace.plan.request import Request
from millrace.plan.scheduler import Scheduler, SchedulerSettings


class Device:
    """Copies end when a test says so."""

    def __init__(self) -> None:
        self.held: dict[int, Adapter | None] = {}
        self.copies_end = True
        self.free_bytes = 1 << 20
        """In which the copies must fit, beside what is copied."""

    def fill(self, slot: int, adapter: Adapter | None) -> Any:
        if adapter is None:
            freed = self.held.pop(slot, None)
            self.free_bytes += 0 if freed is None else freed.num_bytes
            return lambda: True
        if adapter.num_bytes > self.free_bytes:
            raise DeviceFull("The device has no memory for it.")
        self.free_bytes -= adapter.num_bytes

        def is_ready() -> bool:
            if self.copies_end:
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
        self.now = 0.0
        self.requests = AdaptedRequests(self.store, num_slots, self.device.fill, lambda: self.now, max_bytes)
        self._next = 0
        self.taken: set[int] = set()
        """All that ever had a slot."""

    def ask(self, size: int, *, waits: bool = True) -> int:
        """The id of a request for the adapter of that size, whose files are read at once."""
        known = self.store.declare(str(size), Path(f"/{size}"))
        self._next += 1
        request = Request(id=self._next, prompt=np.zeros(1, np.int32), max_tokens=1)
        if not self.requests.hold(request, SamplingParams(adapter=str(size))):
            self.ready = [self._next]
            self.taken.add(self._next)
            return self._next
        if waits and self.store.loads(known):
            self.store.run(lambda: None).result(30)
            self.requests.note_loaded(self.store.take_done())
        self.advance()
        return self._next

    def advance(self) -> list[int]:
        self.ready = [request.id for request, _ in self.requests.take_ready()]
        self.taken.update(self.ready)
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
    assert (own.ready, own.requests.is_loading, own.requests.slots.digests) == ([], True, frozenset())
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


def test_a_slot_takes_what_its_adapters_rank_needs(world: Any) -> None:
    def adapter(rank: int, number: int) -> Adapter:
        part = LoraPart(torch.zeros(rank, 8), torch.zeros(rank, 16), 1.0)
        return Adapter(*join({0: pack([part])}), rank, f"{rank}-{number}", "", Path())

    room = 8 * adapter(64, 0).num_bytes
    slots = world(num_slots=64, max_bytes=room).requests.slots
    assert all(slots.give(f"low{number}", adapter(8, number), 0.0) for number in range(64))
    assert slots.used_bytes == room, "64 adapters of rank 8 take an eighth of what 64 of rank 64 would"
    for number in range(2):
        slot = slots.give(f"high{number}", adapter(64, number), 0.0)
        slots.take(slot, number)
    assert [(one.rank, one.adapters, one.bytes) for one in slots.rank_classes()] == [
        (8, 48, 6 * room // 8),
        (64, 2, 2 * room // 8),
    ]
    assert slots.num_evictions == 16


def test_an_adapter_larger_than_the_devices_share_is_refused_also_when_it_is_known(world: Any) -> None:
    own = world(num_slots=4, max_bytes=100)
    for _ in range(2):
        number = own.ask(101)
        failed = own.requests.take_failed()
        assert [one.request_id for one in failed] == [number]
        assert "101 bytes, and the device has 100 for all adapters. Raise --max-adapters" in failed[0].message


def test_a_request_that_lacks_memory_is_not_passed_for_ever(world: Any) -> None:
    """Smaller adapters are always in use, and always asked for again before their last request ends."""
    own = world(num_slots=8, max_bytes=100)
    small = {size: own.ask(size) for size in (30, 31, 32)}
    large = own.ask(70)
    own.now = MAX_PASSED_S + 1
    for _ in range(3):
        for size, running in small.items():
            small[size] = own.ask(size)
            own.requests.close(running)
        own.ask(20)  # Fits beside the others, but came later.
        if large in own.taken:
            break
    else:
        pytest.fail("others were given memory before it, again and again")
    assert own.device.num_bytes <= 100


def test_those_that_need_not_give_way_go_on_while_one_lacks_memory(world: Any) -> None:
    own = world(num_slots=8, max_bytes=100)
    first, second, third = own.ask(30), own.ask(31), own.ask(32)
    large = own.ask(60)
    own.now = MAX_PASSED_S + 1
    own.requests.close(own.ask(32))
    assert own.ready, "the two used longest ago are enough for the large one"
    own.ask(31)
    assert own.ready == []
    own.requests.close(first)
    own.requests.close(second)
    assert large in own.advance()
    own.requests.close(third)


def test_what_waits_for_room_stays_in_host_memory_once_it_is_its_turn(world: Any) -> None:
    own = world(num_slots=1)
    own.store.max_bytes = 50
    running = own.ask(30)
    waiting = own.ask(31)
    own.now = MAX_PASSED_S + 1
    own.advance()
    own.ask(32)  # Room for one of the two beside what runs.
    own.requests.close(running)
    assert own.advance() == [waiting]
    known = own.store.get("31")
    assert known is not None
    assert known.loads == 1, "its files are not read again"


def test_a_slot_that_cannot_be_filled_ends_its_requests_only(world: Any) -> None:
    own = world(num_slots=4, max_bytes=100)
    first = own.ask(40)
    own.device.free_bytes = 10
    second = own.ask(50)
    failed = own.requests.take_failed()
    assert [one.request_id for one in failed] == [second]
    assert "no memory" in failed[0].message
    third = own.ask(5)
    assert own.ready == [third]
    own.requests.close(first)
    own.device.free_bytes = 45
    assert own.ask(50) in own.ready, "what nobody uses gives way, as its memory may be needed"
    assert own.device.num_bytes <= 60


def test_waiting_for_files_and_for_a_copy_has_a_bound(world: Any) -> None:
    own = world(num_slots=4)
    own.device.copies_end = False
    copying = own.ask(10)
    is_open = threading.Event()
    own.store.run(lambda: is_open.wait(60))
    reading = own.ask(20, waits=False)
    own.now = LIMIT_S - 1
    assert own.advance() == []
    assert own.requests.take_failed() == []
    own.now = LIMIT_S + 1
    assert own.advance() == []
    is_open.set()
    failed = {one.request_id: one.message for one in own.requests.take_failed()}
    assert sorted(failed) == [copying, reading]
    assert "were not read within" in failed[reading]
    assert "was not copied to the device within" in failed[copying]
    own.device.copies_end = True
    assert own.advance() == []
    assert not own.requests.has_waiting


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


class OneFails:
    """Grammars of which one cannot be compiled, which is known after all adapters have been looked at."""

    def __init__(self, request_id: int) -> None:
        self._request_id, self.is_compiling, self.stats = request_id, False, GrammarStats()
        self._request: Request | None = None

    def hold(self, request: Request, params: SamplingParams, now: float) -> bool:
        self._request, self.is_compiling = request, True
        return True

    def take_ready(self, now: float) -> list[Request]:
        return []

    def take_failed(self) -> list[Any]:
        is_due, self.is_compiling = self.is_compiling, False
        return [Failed(self._request_id, "error", "It is too complex.")] if is_due else []

    def drop(self, request_id: int) -> Request | None:
        request, self._request = self._request, None
        return request

    def close(self, request_id: int) -> None: ...

    def shut_down(self) -> None: ...


class Failed(NamedTuple):
    request_id: int
    reason: str
    message: str


def test_a_slot_that_becomes_free_while_no_step_runs_is_given_away_at_once(world: Any) -> None:
    """Nothing else wakes the engine: it would wait for a message."""
    own = world(num_slots=1)
    for size in (10, 20):
        own.store.declare(str(size), Path(f"/{size}"))
        own.store.load(own.store.get(str(size)))
    own.store.run(lambda: None).result(60)
    own.store.take_done()
    own.requests = AdaptedRequests(own.store, 1, own.device.fill)
    asked = []
    for number, size, grammar in ((1, "10", Grammar("json_object")), (2, "20", None)):
        params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, adapter=size, grammar=grammar)
        asked.append(NewRequest(id=number, prompt=pack_tokens(range(5)), params=params, arrival=0.0))
    channel = FakeChannel(asked)
    scheduler = Scheduler(SchedulerSettings(num_blocks=8, block_size=4, max_running=2, token_budget=8))
    engine = Engine(
        *(scheduler, FakeRunner(), FakeDevice(), channel),
        facts=FakeRunner.facts,
        parts=EngineParts(
            constrained=cast(Any, OneFails(1)), adapters=lambda shares: EngineAdapters(own.requests, lambda: shares)
        ),
    )
    run_engine(engine)
    assert len(channel.tokens[2]) == 3
