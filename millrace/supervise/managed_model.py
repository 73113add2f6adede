"""One model of a server and its engine, which comes and goes: started, watched, retired."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from millrace.errors import EngineUnavailable
from millrace.model_settings import ModelSettings
from millrace.supervise.engine_supervisor import EngineSupervisor

if TYPE_CHECKING:
    from millrace.link.client import EngineClient
    from millrace.link.messages import Idleness
    from millrace.supervise.engine_process import EngineHandle

log = logging.getLogger("millrace.serve")

LAST_MESSAGES_S = 5.0
"""Bound on the wait for the last messages of a retired engine."""
LOADING_SILENCE_S = 600.0
"""An engine that loads and reports nothing for this long is given up: other models wait for the memory it plans."""
LOADING_POLL_S = 1.0


class ManagedModel:
    def __init__(
        self,
        settings: ModelSettings,
        client: EngineClient,
        start: Callable[[], EngineHandle],
        on_started: Callable[[EngineHandle], None],
        on_given_up: Callable[[str], None],
        on_unloaded: Callable[[], None],
    ) -> None:
        """`start` starts an engine. `on_started` is called with each engine, `on_given_up` if it keeps dying."""
        self.settings = settings
        self.client = client
        self.keep_alive_s = settings.config.model.keep_alive_s
        self.keep_alive_changed = asyncio.Event()
        self.turn = asyncio.Lock()
        """Held while the engine is started or retired."""
        self._start = start
        self._on_started = on_started
        self._on_given_up = on_given_up
        self._on_unloaded = on_unloaded
        self._supervisor: EngineSupervisor | None = None
        self._short_of_memory = asyncio.Event()
        client.on_lacks_memory = self._on_lacks_memory
        self.memory_message = ""
        """Why the last engine did not fit; empty if it did."""

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def engine(self) -> EngineHandle | None:
        return self._supervisor.engine if self._supervisor is not None else None

    def _on_lacks_memory(self, message: str) -> bool:
        self.memory_message = message
        self._short_of_memory.set()
        return True

    async def start_engine(self, engine: EngineHandle | None = None) -> str | None:
        """Start an engine, or watch this one, and wait until it is ready. Returns why it could not start."""
        began = time.monotonic()
        await self.stop_engine()  # One whose restart found too little memory may be trying again.
        if engine is None:
            try:
                engine = self._start()
            except EngineUnavailable as error:
                return error.message
            self.client.reconnect(engine.channel(0))
        self.memory_message = ""
        self._short_of_memory.clear()
        supervisor = self._supervisor = EngineSupervisor(engine, self._start)
        supervisor.watch(self.client, on_replaced=self._on_started, on_given_up=self._on_lost)
        self._on_started(engine)
        ready = asyncio.ensure_future(self.client.wait_ready())
        short = asyncio.ensure_future(self._short_of_memory.wait())
        try:
            await self._first_of(ready, short)
            if ready.done():
                ready.result()
                log.debug("%s is loaded after %.1f s.", self.name, time.monotonic() - began)
                return None
            failure = self.memory_message or f"Its engine reported nothing for {LOADING_SILENCE_S:g} s while loading."
        except EngineUnavailable as error:
            failure = error.message
        finally:
            ready.cancel()
            short.cancel()
        await self.stop_engine()
        return failure

    async def _first_of(self, *waits: asyncio.Future[Any]) -> None:
        """Wait for the first of these, or until the engine has been silent for too long."""
        while not any(wait.done() for wait in waits) and self.client.silent_s(time.monotonic()) < LOADING_SILENCE_S:
            await asyncio.wait(waits, timeout=LOADING_POLL_S, return_when=asyncio.FIRST_COMPLETED)

    def _on_lost(self, message: str) -> None:
        """The engine kept dying after it had been ready. (One that never was is reported by `start_engine`.)"""
        if self.client.num_engine_starts and self._supervisor is not None and not self.turn.locked():
            self._on_given_up(message)

    async def retire(self, idle_s: float) -> Idleness | None:
        """Unload the model if it has been idle for so long. None: it is not loaded."""
        async with self.turn:
            if self.client.ready is None:
                return None
            try:
                idleness = await self.client.retire(idle_s)
            except EngineUnavailable:
                return None
            if idleness.is_retired:
                if self._supervisor is not None:
                    self._supervisor.close()
                await self.client.wait_unloaded(LAST_MESSAGES_S)
                self.client.unload()
                await self.stop_engine()
                self.keep_alive_s = self.settings.config.model.keep_alive_s
                self._on_unloaded()
            return idleness

    async def stop_engine(self) -> None:
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            supervisor.close()
            await asyncio.to_thread(supervisor.engine.stop)

    def close(self) -> EngineHandle | None:
        """Stop watching. Returns the engine, which still runs."""
        if self._supervisor is None:
            return None
        self._supervisor.close()
        return self._supervisor.engine
