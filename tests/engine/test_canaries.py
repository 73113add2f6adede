"""A share of an adapter's requests goes to a new version, which is taken back when they fail or are slow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from millrace.engine.adapters import canary_journal
from millrace.engine.adapters.canaries import MAX_RUNNING, Canaries
from millrace.engine.adapters.canary_journal import CanaryJournal
from millrace.engine.adapters.requests import AdaptedRequests
from millrace.engine.adapters.service import EngineAdapters
from millrace.engine.adapters.store import AdapterStore
from millrace.engine.figures.shares import Shares
from millrace.link.adapter_messages import AdapterAnswer, AddAdapter, AddCanary, CanaryFigures
from millrace.link.messages import Finish, Query
from millrace.models.adapters.read import Adapter
from millrace.observe.engine_metrics import canary_metrics
from millrace.params.classes import FinishReason
from millrace.params.sampling import SamplingParams
from millrace.plan.request import Request


class World:
    """The adapter `legal`, whose versions are named after their directories."""

    def __init__(self, file: Path | None = None, path: str = "/old") -> None:
        """`file`: of the journal. `path`: where the settings say that it is."""
        self.store = AdapterStore(self.read, 1 << 20)
        self.store.declare("legal", Path(path))
        requests = AdaptedRequests(self.store, 4, lambda slot, adapter: lambda: True)
        canaries = Canaries(None if file is None else CanaryJournal(file))
        self.adapters = EngineAdapters(requests, Shares, canaries=canaries)
        self.next_id = 0

    @staticmethod
    def read(folder: Path) -> Adapter:
        return Adapter(torch.zeros(4), {}, 4, folder.name.encode().hex(), "", folder)

    def query(self, kind: Any, name: str) -> AdapterAnswer:
        self.next_id += 1
        reply = self.adapters.answer(Query(0, self.next_id, kind, name))
        if reply is None:
            self.store.run(lambda: None).result(60)
            ((_, reply),) = self.adapters.advance(0.0)
        return msgspec.json.decode(reply.body, type=AdapterAnswer)

    def start(self, share: float = 0.25, name: str = "legal", path: str = "/new") -> AdapterAnswer:
        asked = AddCanary(name, path, share, max_failed=0.05, max_slowdown=1.5)
        return self.query("add_canary", msgspec.json.encode(asked).decode())

    def ask(self, reason: FinishReason = "stop", token_s: float = 0.01) -> str:
        """One request, from its beginning to its end; returns the version that it got."""
        self.next_id += 1
        version = self.begin(self.next_id)
        finish = Finish(self.next_id, reason, output_tokens=10, queued_s=5.0, total_s=5.0 + 10 * token_s)
        self.adapters.close(self.next_id, reason, finish if reason in ("stop", "length") else None)
        return version

    def begin(self, request_id: int, output: bytes = b"") -> str:
        request = Request(id=request_id, prompt=np.zeros(1, np.int32), max_tokens=9, output=output)
        if self.adapters.hold(request, SamplingParams(adapter="legal")):
            self.store.run(lambda: None).result(60)
            self.adapters.advance(0.0)
            assert [one.id for one, _ in self.adapters.take_ready()] == [request.id]
        return bytes.fromhex(request.salt.removeprefix(b"adapter\0").hex()).decode()

    def until_ended(self, ask: Callable[[], object]) -> CanaryFigures:
        for _ in range(400):
            ask()
            if self.canary.state != "running":
                return self.canary
        raise AssertionError("the canary still runs")

    @property
    def canary(self) -> CanaryFigures:
        (figures,) = self.adapters.figures()
        assert figures.canary is not None
        return figures.canary


@pytest.fixture
def world() -> Iterator[World]:
    own = World()
    yield own
    own.adapters.shut_down()


def test_shares_are_exact_and_all_requests_follow_a_promotion(world: World) -> None:
    assert world.ask() == "old"
    assert not world.start(share=0.25).error
    assert [world.ask() for _ in range(8)] == ["old", "old", "old", "new"] * 2
    assert (world.canary.old.requests, world.canary.new.requests) == (6, 2)
    assert world.query("promote_canary", "legal").adapters[0].path == "/new"
    assert {world.ask() for _ in range(8)} == {"new"}
    assert "No canary of 'legal' is running" in world.query("promote_canary", "legal").error


def test_all_requests_get_the_old_version_after_an_abort(world: World) -> None:
    world.start(share=1.0)
    assert world.ask() == "new"
    assert world.query("abort_canary", "legal").adapters[0].path == "/old"
    assert {world.ask() for _ in range(8)} == {"old"}


def test_it_is_taken_back_when_its_requests_fail(world: World) -> None:
    world.start(share=0.5)

    def fails() -> None:
        request = Request(id=10_000 + world.next_id, prompt=np.zeros(1, np.int32), max_tokens=1)
        world.next_id += 1
        is_new = world.adapters.canaries.version("legal", request.id) is not None
        world.adapters.close(request.id, "error" if is_new else "stop")

    ended = world.until_ended(fails)
    assert (ended.state, ended.new.failed) == ("returned", 3)
    assert "3 of 3 requests of the new version failed" in ended.why
    assert {world.ask() for _ in range(8)} == {"old"}


def test_it_is_taken_back_when_it_is_slow(world: World) -> None:
    world.start(share=0.5)
    for _ in range(100):
        world.ask()
    assert world.canary.state == "running"

    def slow() -> None:
        is_new_next = world.adapters.canaries.running("legal").due >= 0.5  # type: ignore[union-attr]
        world.ask(token_s=0.04 if is_new_next else 0.01)

    ended = world.until_ended(slow)
    assert ended.state == "returned"
    assert "A token of the new version takes 25.0 ms" in ended.why


def test_requests_that_clients_end_say_nothing(world: World) -> None:
    world.start(share=1.0)
    for _ in range(20):
        world.ask("abort")
    assert (world.canary.state, world.canary.new.requests) == ("running", 0)


def test_what_cannot_be_a_canary_is_refused(world: World) -> None:
    assert world.start(name="absent").is_unknown
    assert not world.start().error
    assert "runs already. Promote or abort it first" in world.start().error
    for number in range(MAX_RUNNING):
        world.store.declare(f"a{number}", Path(f"/a{number}"))
        problem = world.start(name=f"a{number}", path=f"/b{number}").error
    assert f"{MAX_RUNNING} canaries run already" in problem
    families = {family.name: family for family in canary_metrics(world.adapters.stats.canaries)}
    assert len(families["millrace_adapter_canary_share"].samples) == MAX_RUNNING


def test_an_adapter_that_is_removed_or_replaced_has_no_canary(world: World) -> None:
    world.start()
    world.query("drop_adapter", "legal")
    assert world.adapters.stats.canaries.running == ()
    assert world.adapters.stats.canaries.ended == {"aborted": 1}


class Engines:
    """One engine after the other, with one journal."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._worlds: list[World] = []

    def next(self, *, crashed: bool = False, path: str = "/old") -> World:
        if self._worlds:
            self._worlds[-1].adapters.shut_down(is_in_order=not crashed)
            journal = self._worlds[-1].adapters.canaries.journal
            assert journal is not None
            journal.close()  # As the end of its process does.
        self._worlds.append(World(self.file, path))
        return self._worlds[-1]

    def close(self) -> None:
        self._worlds[-1].adapters.shut_down()


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    own = Engines(tmp_path / "data" / "canaries.jsonl")
    yield own
    own.close()


@pytest.mark.parametrize("crashed", [False, True], ids=["stopped", "crashed while idle"])
def test_a_canary_goes_on_after_a_restart(engines: Engines, crashed: bool) -> None:
    first = engines.next()
    first.start(share=0.25)
    assert [first.ask(token_s=0.02) for _ in range(6)] == ["old", "old", "old", "new", "old", "old"]
    before = first.canary
    second = engines.next(crashed=crashed)
    assert second.canary == before
    assert second.adapters.stats.canaries.ended == {}
    assert [second.ask() for _ in range(4)] == ["old", "new", "old", "old"], "its share goes on where it was"
    assert (second.canary.old.requests, second.canary.new.requests) == (8, 2)


def test_what_became_of_a_canary_is_known_after_a_restart(engines: Engines) -> None:
    first = engines.next()
    first.start(share=0.5)
    first.query("abort_canary", "legal")
    second = engines.next()
    assert second.canary.state == "aborted"
    second.start(share=1.0)
    ended = second.until_ended(lambda: second.ask("error"))
    third = engines.next(crashed=True)
    assert third.canary == ended
    assert third.canary.state == "returned"
    assert third.ask() == "old"
    third.query("drop_adapter", "legal")
    fourth = engines.next()
    assert fourth.adapters.figures()[0].canary is None


def test_a_promoted_version_stays_until_the_settings_name_another(engines: Engines) -> None:
    first = engines.next()
    first.start(share=0.5)
    first.query("promote_canary", "legal")
    second = engines.next()
    assert (second.canary.state, second.ask()) == ("promoted", "new")
    assert engines.next(path="/other").ask() == "other"


def test_a_crash_counts_as_an_error_of_the_version_that_ran(engines: Engines) -> None:
    world = engines.next()
    world.start(share=0.5)
    assert (world.begin(1001), world.ask(), world.ask()) == ("old", "new", "old")
    world = engines.next(crashed=True)
    assert (world.canary.old.failed, world.canary.new.failed) == (1, 0)
    for number, why in enumerate(("running", "running", "returned")):
        assert (world.begin(2000 + number), world.begin(3000 + number)) == ("new", "old")
        world = engines.next(crashed=True)
        assert (world.canary.old.failed, world.canary.new.failed, world.canary.state) == (1, number + 1, why)
    assert "3 of 4 requests of the new version failed, and 1 of 2" in world.canary.why
    assert {world.ask() for _ in range(4)} == {"old"}


def test_an_answer_that_has_begun_goes_on_with_its_version(engines: Engines) -> None:
    first = engines.next()
    first.start(share=0.5)
    assert [first.begin(number) for number in range(1001, 1005)] == ["old", "new", "old", "new"]
    second = engines.next(crashed=True)
    before = second.canary
    third = engines.next(crashed=True)
    assert third.canary == before, "nothing of it ran in the second engine"
    output = np.zeros(2, np.int32).tobytes()
    assert [third.begin(number, output) for number in (1002, 1001, 1004, 1003)] == ["new", "old", "new", "old"]
    fourth = engines.next()  # In order, which ends all requests.
    assert fourth.begin(1002, output) == "old", "by share: another request has the id of that one"


def test_told_again_of_the_adapter_its_canary_goes_on(engines: Engines) -> None:
    world = engines.next()
    world.start(share=0.5)
    for is_told, expected in ((True, "running"), (False, None)):
        asked = AddAdapter("legal", "/old", is_told=is_told)
        assert not world.query("add_adapter", msgspec.json.encode(asked).decode()).error
        canary = world.adapters.figures()[0].canary
        assert (canary and canary.state) == expected


def test_a_long_journal_is_written_anew(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canary_journal, "MAX_BYTES", 3000)
    first = engines.next()
    first.start(share=0.25)
    for _ in range(100):
        first.ask()
    first.begin(1001)
    before = first.canary
    assert engines.file.stat().st_size < 6000
    second = engines.next(crashed=True)
    assert second.canary.new == before.new
    assert second.canary.old.failed == 1


def test_a_damaged_journal_is_read_up_to_there(engines: Engines, caplog: pytest.LogCaptureFixture) -> None:
    engines.next().start(share=0.5)
    engines.next(crashed=True)
    with engines.file.open("ab") as file:
        file.write(b'{"taken": ["legal", 1,')
    assert engines.next(crashed=True).canary.state == "running"
    assert "cannot be read from line" in caplog.text


def test_two_servers_do_not_share_a_journal(engines: Engines, caplog: pytest.LogCaptureFixture) -> None:
    engines.next().start(share=0.5)
    other = World(engines.file)
    try:
        assert other.adapters.figures()[0].canary is None
        assert not other.start().error
        assert "Give this one another --name" in caplog.text
    finally:
        other.adapters.shut_down()
    assert engines.next().canary.state == "running"
