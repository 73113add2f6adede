"""Loading and unloading of models, with engines that are objects: single flight, LRU, busy models, lack of memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from helpers.waiting import LIMIT_S, until
from link.test_engine_client import Receiver
from serve.front_under_test import endless
from serve.null_engine import NullEngine

from millrace.config import Config, replace
from millrace.errors import EngineUnavailable
from millrace.link.channel import FrontChannel
from millrace.link.client import EngineClient
from millrace.link.messages import Retire, ToEngine
from millrace.model_settings import ModelSettings
from millrace.params.sampling import SamplingParams
from millrace.supervise import engine_supervisor, model_supervisor
from millrace.supervise.engine_process import OnDeath
from millrace.supervise.model_supervisor import ModelSupervisor


class CountingEngine(NullEngine):
    """Counts how often it was asked whether it is idle."""

    num_asked = 0

    def send(self, message: ToEngine) -> None:
        self.num_asked += isinstance(message, Retire)
        super().send(message)


class Handle:
    """An engine that is an object of this process."""

    def __init__(self, engine: CountingEngine) -> None:
        self.engine = engine
        self.on_death: OnDeath = lambda message: None
        self.is_stopped = False

    def channel(self, front_index: int = 0) -> FrontChannel:
        return self.engine

    def watch(self, loop: asyncio.AbstractEventLoop, on_death: OnDeath) -> None:
        self.on_death = on_death

    def kill(self) -> None: ...

    def stop(self) -> None:
        self.is_stopped = True


class Machine:
    """Starts engines. `room` is how many fit in its memory."""

    def __init__(self, names: str, *, room: int = 100, **server: Any) -> None:
        changes = {f"server__{name}": value for name, value in server.items()}
        self.room = room
        self.loading = ""
        """Models whose engines are silent."""
        self.broken = ""
        """Models whose engines end before they have read their settings."""
        self.started: list[str] = []
        self.started_beside: list[str] = []
        """The models that were being loaded when another was started."""
        self.running: dict[str, Handle] = {}
        self.models = tuple(
            ModelSettings(name, (), replace(Config(), **changes), loads_at_start=name.isupper()) for name in names
        )
        self.clients = {name: EngineClient(None) for name in names}
        self.lost: list[str] = []
        self.prepared: list[str] = []
        """The loaded models at each time that a spare engine was wanted."""
        self.news: list[dict[str, Any]] = []
        self.supervisor = ModelSupervisor(
            self.models,
            self.clients,
            start=self.start,
            announce=self.news.append,
            on_only_model_lost=self.lost.append,
            prepare=lambda: self.prepared.append(self.loaded),
        )

    def start(self, model: ModelSettings) -> Handle:
        if model.name in self.broken:
            raise EngineUnavailable("It ended at once.")
        self.started.append(model.name)
        running = [name for name, handle in self.running.items() if not handle.is_stopped]
        self.started_beside += [name for name in running if self.clients[name].ready is None]
        fits = len(running) < self.room
        engine = CountingEngine(endless, vocab_size=50, is_ready=fits and model.name not in self.loading, step_s=0.02)
        handle = self.running[model.name] = Handle(engine)
        if not fits:
            handle.is_stopped = True
            asyncio.get_running_loop().call_soon(lambda: engine.die("too big", lacks_memory=True))
        return handle

    async def use(self, name: str) -> None:
        """A request to this model, as a front makes it: wait for the engine, submit, and keep it running."""
        self.clients[name].want()
        await self.clients[name].wait_ready(LIMIT_S)

    def occupy(self, name: str) -> int:
        return self.clients[name].submit([1], SamplingParams(max_tokens=4000, ignore_eos=True), Receiver())

    async def asked_twice(self, name: str) -> None:
        """Wait until the supervisor has asked this engine twice more whether it is idle, and had the first answer."""
        engine = self.running[name].engine
        wanted = engine.num_asked + 2
        await until(lambda: engine.num_asked >= wanted)

    @property
    def num_running(self) -> int:
        return sum(not handle.is_stopped for handle in self.running.values())

    @property
    def loaded(self) -> str:
        return "".join(name for name, client in self.clients.items() if client.ready is not None)


def run(names: str, work: Callable[[Machine], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        machine = Machine(names, **options)
        machine.supervisor.begin(None)
        await work(machine)
        machine.supervisor.close()

    asyncio.run(main())


@pytest.fixture(autouse=True)
def _fast_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_supervisor, "POLL_S", 0.01)


def test_ten_requests_load_a_model_once() -> None:
    async def work(machine: Machine) -> None:
        await machine.use("A")
        assert machine.loaded == "A", "only the first is loaded at start"
        await asyncio.gather(*(machine.use("b") for _ in range(10)))
        assert machine.started == ["A", "b"]
        await machine.supervisor.load("b")
        await machine.use("c")
        assert machine.started == ["A", "b", "c"], "a loaded model is not loaded again"

    run("Abc", work)


def test_a_spare_engine_is_wanted_while_a_model_is_not_loaded_and_none_loads() -> None:
    async def work(machine: Machine) -> None:
        await machine.use("A")
        await until(lambda: machine.prepared == ["A"])
        await machine.use("b")
        machine.loading = "A"
        await machine.supervisor.unload("A")
        await until(lambda: len(machine.prepared) > 1)
        assert machine.prepared == ["A", "b"], "none while all are loaded"
        machine.clients["A"].want()
        await until(lambda: machine.started == ["A", "b", "A"])
        await machine.supervisor.unload("b")
        await until(lambda: {"event": "unloaded", "model": "b"} in machine.news)
        assert machine.prepared == ["A", "b"], "A is being loaded"

    run("Ab", work)


def test_the_model_idle_longest_gives_way_and_never_a_busy_one() -> None:
    async def work(machine: Machine) -> None:
        for name in "Ab":
            await machine.use(name)
        machine.running["A"].engine.used_at -= 100
        await machine.use("c")
        assert machine.loaded == "bc"
        assert machine.running["A"].is_stopped
        machine.running["b"].engine.used_at -= 100
        busy = machine.occupy("b")
        await machine.use("A")
        assert machine.loaded == "Ab", "b is idle longest by the clock, but it is busy"
        other = machine.occupy("A")
        waiting = asyncio.create_task(machine.use("c"))
        await machine.asked_twice("A")
        assert not waiting.done(), "all others are busy"
        machine.clients["A"].abort(other)
        await waiting
        assert machine.loaded == "bc"
        machine.clients["b"].abort(busy)

    run("Abc", work, max_loaded=2)


def test_if_all_stay_busy_the_wait_ends_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_supervisor, "RETRY_PAUSE_S", 3600.0)

    async def work(machine: Machine) -> None:
        await machine.use("A")
        machine.occupy("A")
        with pytest.raises(EngineUnavailable, match="'A' had requests"):
            await machine.use("b")
        assert machine.loaded == "A"
        assert not machine.lost
        started = list(machine.started)
        with pytest.raises(EngineUnavailable, match="'A' had requests"):
            await machine.use("b")
        assert machine.started == started, "it is not tried again at once"

    run("Ab", work, max_loaded=1, loading_wait_s=0.05)


def test_a_model_that_does_not_fit_takes_the_memory_of_an_idle_one() -> None:
    async def work(machine: Machine) -> None:
        await machine.use("A")
        await machine.use("b")
        assert machine.loaded == "b"
        assert machine.started == ["A", "b", "b"], "the first attempt found too little memory"
        machine.occupy("b")
        with pytest.raises(EngineUnavailable, match="too big"):
            await machine.use("A")
        assert machine.loaded == "b"

    run("Ab", work, room=1, loading_wait_s=0.05)


def test_keep_alive_unloads_an_idle_model_and_a_request_wakes_it() -> None:
    async def work(machine: Machine) -> None:
        await machine.use("A")
        engine = machine.running["A"].engine
        await machine.supervisor.keep_alive("A", 1000.0)
        await until(lambda: engine.num_asked == 1)
        assert not engine.is_retired
        busy = machine.occupy("A")
        await machine.supervisor.unload("A")
        await machine.asked_twice("A")
        assert not engine.is_retired, "it has a request"
        machine.clients["A"].abort(busy)
        await until(lambda: {"event": "unloaded", "model": "A"} in machine.news)
        assert machine.loaded == ""
        machine.news.clear()
        await machine.use("A")
        configured_s = machine.models[0].config.model.keep_alive_s
        await until(lambda: {"event": "keep_alive", "model": "A", "seconds": configured_s} in machine.news)
        assert not machine.lost

    run("A", work)


def test_a_dead_engine_is_replaced_and_the_other_model_goes_on() -> None:
    async def work(machine: Machine) -> None:
        await machine.use("A")
        await machine.use("b")
        machine.occupy("b")
        machine.running["A"].on_death("killed")
        await until(lambda: machine.started.count("A") == 2 and machine.clients["A"].failure is None)
        assert machine.clients["b"].num_open == 1
        assert machine.started.count("b") == 1

    run("Ab", work)


def test_the_only_model_that_cannot_start_ends_the_server() -> None:
    async def work(machine: Machine) -> None:
        await until(lambda: bool(machine.lost))
        assert "too big" in machine.lost[0]

    run("A", work, room=0)


def test_models_that_wait_for_the_memory_together_do_not_exceed_the_limit() -> None:
    async def work(machine: Machine) -> None:
        await machine.use("A")
        machine.loading = "b"
        for name in "bcd":
            machine.clients[name].want()
        await until(lambda: machine.started == ["A", "b"])
        machine.loading = ""
        machine.running["b"].engine.become_ready()
        for name in "cd":
            await until(lambda name=name: name in machine.started)  # type: ignore[misc]
        assert machine.started_beside == []
        assert machine.num_running <= 3

    run("Abcd", work, max_loaded=3)


def test_a_silent_load_ends_and_the_next_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(machine: Machine) -> None:
        await machine.use("A")
        machine.loading = "b"
        monkeypatch.setattr(machine.clients["b"], "silent_s", lambda now: 3600.0)
        machine.clients["b"].want()
        await machine.use("c")
        assert machine.loaded == "Ac"
        assert "reported nothing" in (machine.clients["b"].failure or "")
        assert machine.running["b"].is_stopped

    run("Abc", work)


def test_another_front_can_load_a_model_again_that_failed_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_supervisor, "RETRY_PAUSE_S", 0.0)

    async def work(machine: Machine) -> None:
        await machine.use("A")
        busy = machine.occupy("A")
        with pytest.raises(EngineUnavailable):
            await machine.use("b")
        machine.clients["A"].abort(busy)
        machine.room, machine.loading = 2, "b"
        num_starts = len(machine.started)
        await machine.supervisor.load("b")
        await until(lambda: len(machine.started) > num_starts)
        machine.running["b"].engine.become_ready()
        await until(lambda: machine.loaded == "Ab")

    run("Ab", work, room=1, loading_wait_s=0.05)


def test_an_engine_that_does_not_fit_when_restarted_is_not_started_twice() -> None:
    async def work(machine: Machine) -> None:
        await machine.use("A")
        await machine.use("b")
        machine.room = 1  # Memory that others took meanwhile.
        machine.running["b"].on_death("killed")
        await until(lambda: machine.started.count("b") == 2 and machine.clients["b"].is_unloaded)
        first = machine.running["b"]
        first.is_stopped = False
        machine.room = 3
        await machine.use("b")
        assert first.is_stopped
        assert machine.running["b"] is not first

    run("Ab", work)


def test_a_model_whose_engine_ends_at_once_fails_and_the_others_are_served() -> None:
    async def work(machine: Machine) -> None:
        await machine.use("A")
        machine.broken = "b"
        with pytest.raises(EngineUnavailable, match="ended at once"):
            await machine.use("b")
        await machine.use("A")
        assert (machine.loaded, machine.lost) == ("A", [])

    run("Ab", work)


def test_a_server_ends_whose_only_engine_ends_at_once_whenever_it_is_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_supervisor, "MAX_RESTARTS", 3)
    monkeypatch.setattr(engine_supervisor, "FIRST_PAUSE_S", 0.0)

    async def work(machine: Machine) -> None:
        await machine.use("A")
        machine.broken = "A"
        machine.running["A"].on_death("killed")
        await until(lambda: machine.lost == ["It ended at once."])

    run("A", work)
