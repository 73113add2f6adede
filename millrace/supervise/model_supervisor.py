"""Loads and unloads the models of a server: on request, once however many ask, and in the memory that they share.

A model that is not needed gives way when another needs its place or its memory: the one that has been idle longest
first, never one that has requests. After `keep_alive_s` without a request a model is unloaded in any case. Whether an
engine is idle is decided by the engine itself, so no request can slip in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from millrace.errors import EngineUnavailable
from millrace.model_settings import ModelSettings
from millrace.supervise.managed_model import ManagedModel
from millrace.supervise.memory_share import config_beside

if TYPE_CHECKING:
    from millrace.config import Config
    from millrace.link.client import EngineClient
    from millrace.supervise.engine_process import EngineHandle

log = logging.getLogger("millrace.serve")

POLL_S = 0.25
"""Interval at which busy models are asked whether they have become idle."""
RETRY_PAUSE_S = 5.0
"""A model that could not be loaded is not tried again for this long."""

Announce = Callable[[dict[str, Any]], None]
"""Tells the other fronts about a model."""


class ModelSupervisor:
    """Implements `serve.model_control.ModelControl` where the engines are started."""

    def __init__(
        self,
        models: Sequence[ModelSettings],
        clients: Mapping[str, EngineClient],
        *,
        start: Callable[[ModelSettings], EngineHandle],
        announce: Announce,
        on_only_model_lost: Callable[[str], None],
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        """`start` starts an engine with these settings. `on_only_model_lost`: nothing is left to serve. `prepare`: an
        engine will be started some time, and nothing else is going on."""
        self._prepare = prepare
        self._start = start
        self._announce = announce
        self._on_only_model_lost = on_only_model_lost
        self._server = models[0].config.server
        self._models = {model.name: self._managed(model, clients[model.name]) for model in models}
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._failures: dict[str, tuple[float, str]] = {}
        """When and why a model could not be loaded last."""
        self._expiring: dict[str, asyncio.Task[None]] = {}
        self._memory = asyncio.Lock()
        """Held while an engine plans its memory, so that two do not plan with the same."""
        self._stopping: asyncio.Task[None] | None = None
        self._closed = False

    def _managed(self, settings: ModelSettings, client: EngineClient) -> ManagedModel:
        name = settings.name
        model = ManagedModel(
            settings,
            client,
            lambda: self._start_engine(name),
            lambda engine: self._announce_engine(name, engine),
            lambda message: self._give_up(name, message),
            lambda: self._on_unloaded(name),
        )
        client.on_wanted = lambda: self._begin_loading(name)
        return model

    def begin(self, first_engine: EngineHandle | None) -> None:
        """Load the models that are loaded at start. `first_engine` belongs to the first of them and runs already."""
        for model in self._models.values():
            if model.settings.loads_at_start:
                self._begin_loading(model.name, first_engine)
                first_engine = None

    def close(self) -> list[EngineHandle]:
        """Stop watching everything. Returns the engines that still run."""
        self._closed = True
        for task in (*self._loading.values(), *self._expiring.values()):
            task.cancel()
        return [engine for model in self._models.values() if (engine := model.close()) is not None]

    # ── for the fronts ────────────────────────────────────────────────────────────────────────────────────────────────
    async def load(self, name: str) -> None:
        self._begin_loading(name)

    async def unload(self, name: str) -> None:
        await self.keep_alive(name, 0.0)

    async def keep_alive(self, name: str, seconds: float) -> None:
        model = self._models[name]
        if model.keep_alive_s != seconds and not model.client.is_unloaded:
            model.keep_alive_s = seconds
            model.keep_alive_changed.set()
            self._announce({"event": "keep_alive", "model": name, "seconds": seconds})

    def use_settings(self, settings: Mapping[str, Config]) -> None:
        """Take over the live settings of models, by name: the keep-alive time, unless a client has set another."""
        for name, config in settings.items():
            model, seconds = self._models[name], config.model.keep_alive_s
            before = model.settings.config.model.keep_alive_s
            if seconds == before:
                continue
            model.settings = dataclasses.replace(model.settings, config=config)
            if model.keep_alive_s == before:
                model.keep_alive_s = seconds
                model.keep_alive_changed.set()
                self._announce({"event": "keep_alive", "model": name, "seconds": seconds})

    # ── loading ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def _begin_loading(self, name: str, engine: EngineHandle | None = None) -> None:
        """Single flight: a model that is being loaded is not loaded twice."""
        if name in self._loading or self._closed:
            return
        failed_at, message = self._failures.get(name, (-RETRY_PAUSE_S, ""))
        if time.monotonic() - failed_at < RETRY_PAUSE_S:
            self._tell_failure(name, message)
            return
        task = self._loading[name] = asyncio.get_running_loop().create_task(self._load(self._models[name], engine))
        task.add_done_callback(lambda done: self._on_loaded(name, done))

    def _on_loaded(self, name: str, task: asyncio.Task[None]) -> None:
        del self._loading[name]
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("Loading %s failed.", name, exc_info=error)
            self._give_up(name, f"The model {name!r} could not be loaded; see the server's log.")
        elif self._models[name].client.ready is not None and not self._closed:
            self._watch_idleness(self._models[name])
        self._prepare_if_quiet()

    def _on_unloaded(self, name: str) -> None:
        self._announce({"event": "unloaded", "model": name})
        self._prepare_if_quiet()

    def _prepare_if_quiet(self) -> None:
        if not self._closed and not self._loading and any(one.client.is_unloaded for one in self._models.values()):
            self._prepare()

    async def _load(self, model: ManagedModel, engine: EngineHandle | None) -> None:
        until = time.monotonic() + self._server.loading_wait_s
        async with model.turn:
            if engine is None and not model.client.is_unloaded:
                return
            failure = await self._load_in_turn(model, engine, until)
        if failure is not None:
            self._give_up(model.name, failure)

    async def _load_in_turn(self, model: ManagedModel, engine: EngineHandle | None, until: float) -> str | None:
        while True:
            if engine is None and not self._has_place(model):
                refusal = await self._evict_one(model, until)
                if refusal is not None:
                    limit = f"--max-loaded is {self._server.max_loaded}"
                    return f"The model {model.name!r} cannot be loaded now: {limit} and {refusal}."
                continue
            async with self._memory:
                if engine is None and not self._has_place(model):
                    continue  # Another model took the place while this one waited.
                failure = await model.start_engine(engine)
            if failure is None or not model.memory_message:
                return failure
            engine, refusal = None, await self._evict_one(model, until)
            if refusal is not None:
                return f"The model {model.name!r} cannot be loaded: {failure}" + self._beside(model, refusal)

    def _beside(self, model: ManagedModel, refusal: str) -> str:
        return f" Besides, {refusal}." if self._num_loaded_beside(model) else ""

    def _has_place(self, model: ManagedModel) -> bool:
        return self._num_loaded_beside(model) < (self._server.max_loaded or len(self._models))

    def _num_loaded_beside(self, model: ManagedModel) -> int:
        return len(self._loaded_beside(model))

    def _loaded_beside(self, model: ManagedModel) -> list[ManagedModel]:
        return [other for other in self._models.values() if other is not model and other.engine is not None]

    async def _evict_one(self, model: ManagedModel, until: float) -> str | None:
        """Unload the model that has been idle longest, as soon as one is. Returns why none can be."""
        while True:
            others = [other for other in self._loaded_beside(model) if other.client.ready is not None]
            if not others and not any(other.name in self._loading for other in self._loaded_beside(model)):
                return "no other model is loaded that could give way"
            idle_s = await self._idle_times(others)
            for other in sorted(idle_s, key=lambda one: -idle_s[one]):
                idleness = await other.retire(0.0)
                if idleness is not None and idleness.is_retired:
                    log.info("%s gives way to %s after %.0f s without requests.", other.name, model.name, idle_s[other])
                    return None
            if time.monotonic() > until:
                names = ", ".join(repr(other.name) for other in others)
                return f"{names} had requests for {self._server.loading_wait_s:g} s; try again later"
            await asyncio.sleep(POLL_S)

    async def _idle_times(self, models: Sequence[ManagedModel]) -> dict[ManagedModel, float]:
        """Of those that have no requests."""
        found: dict[ManagedModel, float] = {}
        for model in models:
            with contextlib.suppress(EngineUnavailable):
                idleness = await model.client.retire()
                if not idleness.open_requests:
                    found[model] = idleness.idle_s
        return found

    def _start_engine(self, name: str) -> EngineHandle:
        settings = self._models[name].settings
        others = self._running_beside(name)
        places = min(self._server.max_loaded or len(self._models), len(self._models)) - len(others)
        config = config_beside(settings.config, others, places)
        reserved_gib = config.memory.reserved_gib - settings.config.memory.reserved_gib
        if reserved_gib > 0:
            log.info(
                "%s is planned beside %d loaded models, for which %.2f GiB of the free memory stay reserved.",
                name,
                len(others),
                reserved_gib,
            )
        return self._start(ModelSettings(name, settings.aliases, config, settings.loads_at_start))

    def _running_beside(self, name: str) -> list[tuple[Any, int]]:
        from millrace.supervise.engine_process import EngineProcess

        return [
            (model.client.ready, model.engine.process.pid)
            for model in self._models.values()
            if model.name != name and model.client.ready is not None and isinstance(model.engine, EngineProcess)
        ]

    def _give_up(self, name: str, message: str) -> None:
        """The model cannot be served for now. The server ends if it has no other and this one never started or keeps
        dying."""
        model = self._models[name]
        keeps_dying, never_started = model.engine is not None, model.client.num_engine_starts == 0
        self._failures[name] = (time.monotonic(), message)
        self._tell_failure(name, message)
        if len(self._models) == 1 and (keeps_dying or never_started):
            self._on_only_model_lost(message)
            return
        log.error("%s: %s", name, message)
        if keeps_dying:
            self._stopping = asyncio.get_running_loop().create_task(model.stop_engine())

    def _tell_failure(self, name: str, message: str) -> None:
        self._models[name].client.give_up(message)
        self._announce({"event": "failed", "model": name, "message": message})

    def _announce_engine(self, name: str, engine: EngineHandle) -> None:
        from millrace.supervise.engine_process import EngineProcess

        if isinstance(engine, EngineProcess):
            self._announce({"event": "engine", "model": name, "directory": engine.directory, "pid": engine.process.pid})

    # ── unloading ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def _watch_idleness(self, model: ManagedModel) -> None:
        self._announce({"event": "keep_alive", "model": model.name, "seconds": model.keep_alive_s})
        before = self._expiring.get(model.name)
        if before is not None:  # Of the last engine, which was evicted.
            before.cancel()
        self._expiring[model.name] = asyncio.get_running_loop().create_task(self._expire(model))

    async def _expire(self, model: ManagedModel) -> None:
        """Unload the model once it has been idle for its `keep_alive_s`. Ends when it is unloaded."""
        while not self._closed:
            model.keep_alive_changed.clear()
            keep_s, wait_s = model.keep_alive_s, None
            if keep_s >= 0:
                idleness = await model.retire(keep_s)
                if idleness is None and model.client.is_unloaded:
                    return
                if idleness is not None and idleness.is_retired:
                    log.info("%s is unloaded after %.0f s without requests.", model.name, idleness.idle_s)
                    return
                wait_s = max(POLL_S, keep_s - (idleness.idle_s if idleness is not None else 0.0))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(model.keep_alive_changed.wait(), wait_s)
            if model.client.is_unloaded:
                return
