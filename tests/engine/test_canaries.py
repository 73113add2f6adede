"""A share of an adapter's requests goes to a new version, which is taken back when they fail or are slow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from millrace.engine.adapters.canaries import MAX_RUNNING
from millrace.engine.adapters.requests import AdaptedRequests
from millrace.engine.adapters.service import EngineAdapters
from millrace.engine.adapters.store import AdapterStore
from millrace.engine.figures.shares import Shares
from millrace.link.adapter_messages import AdapterAnswer, AddCanary, CanaryFigures
from millrace.link.messages import Finish, Query
from millrace.models.adapters.read import Adapter
from millrace.observe.engine_metrics import _canaries
from millrace.params import FinishReason, SamplingParams
from millrace.plan.request import Request


class World:
    """The adapter `legal`, whose versions are named after their directories."""

    def __init__(self) -> None:
        self.store = AdapterStore(self.read, 1 << 20)
        self.store.declare("legal", Path("/old"))
        self.adapters = EngineAdapters(AdaptedRequests(self.store, 4, lambda slot, adapter: lambda: True), Shares)
        self._next = 0

    @staticmethod
    def read(folder: Path) -> Adapter:
        return Adapter(torch.zeros(4), {}, 4, folder.name.encode().hex(), "", folder)

    def query(self, kind: Any, name: str) -> AdapterAnswer:
        self._next += 1
        reply = self.adapters.answer(Query(0, self._next, kind, name))
        if reply is None:
            self.store.run(lambda: None).result(60)
            ((_, reply),) = self.adapters.advance(0.0)
        return msgspec.json.decode(reply.body, type=AdapterAnswer)

    def start(self, share: float = 0.25, name: str = "legal", path: str = "/new") -> AdapterAnswer:
        asked = AddCanary(name, path, share, max_failed=0.05, max_slowdown=1.5)
        return self.query("add_canary", msgspec.json.encode(asked).decode())

    def ask(self, reason: FinishReason = "stop", token_s: float = 0.01) -> str:
        """One request, from its beginning to its end; returns the version that it got."""
        self._next += 1
        request = Request(id=self._next, prompt=np.zeros(1, np.int32), max_tokens=1)
        if self.adapters.hold(request, SamplingParams(adapter="legal")):
            self.store.run(lambda: None).result(60)
            self.adapters.advance(0.0)
            assert [one.id for one, _ in self.adapters.take_ready()] == [request.id]
        version = bytes.fromhex(request.salt.removeprefix(b"adapter\0").hex()).decode()
        finish = Finish(request.id, reason, output_tokens=10, queued_s=5.0, total_s=5.0 + 10 * token_s)
        self.adapters.close(request.id, reason, finish if reason in ("stop", "length") else None)
        return version

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
        request = Request(id=10_000 + world._next, prompt=np.zeros(1, np.int32), max_tokens=1)
        world._next += 1
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
        is_new_next = world.adapters.canaries.running("legal")._due >= 0.5  # type: ignore[union-attr]
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
    families = {family.name: family for family in _canaries(world.adapters.stats.canaries)}
    assert len(families["millrace_adapter_canary_share"].samples) == MAX_RUNNING


def test_an_adapter_that_is_removed_or_replaced_has_no_canary(world: World) -> None:
    world.start()
    world.query("drop_adapter", "legal")
    assert world.adapters.stats.canaries.running == ()
    assert world.adapters.stats.canaries.ended == {"aborted": 1}
