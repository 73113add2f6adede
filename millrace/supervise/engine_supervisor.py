"""Keeps an engine running: notices when it dies and starts another.

If the first engine cannot start, the server ends with the engine's error. An engine that dies later is restarted, the
first time at once, then with growing pauses; the fronts stay up and report it on /ready.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from millrace.errors import EngineUnavailable

if TYPE_CHECKING:
    from millrace.link.client import EngineClient
    from millrace.supervise.engine_process import EngineHandle

log = logging.getLogger("millrace.serve")

LAST_MESSAGE_S = 0.3
"""Wait after the process has ended: its own last message says more and may still be in transit."""
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 30.0
STABLE_S = 60.0
"""An engine that has served this long resets the restart count."""
MAX_RESTARTS = 10
"""Maximum number of consecutive restarts in which no engine served for STABLE_S."""


class EngineSupervisor:
    def __init__(self, engine: EngineHandle, start: Callable[[], EngineHandle]) -> None:
        """`engine` is running; `start` starts another."""
        self._start = start
        self.engine = engine
        self._client: EngineClient | None = None
        self._on_replaced: Callable[[EngineHandle], None] = lambda engine: None
        self._on_given_up: Callable[[str], None] = lambda message: None
        self._num_restarts = 0
        self._starts_before = 0
        """Of the client, by engines of other supervisors."""
        self._ready_at = 0.0
        """When the engine became ready; infinite until it is."""
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()

    def watch(
        self,
        client: EngineClient,
        *,
        on_replaced: Callable[[EngineHandle], None],
        on_given_up: Callable[[str], None],
    ) -> None:
        """Start watching, on this loop. `on_replaced` is called with each new engine, `on_given_up` with the error."""
        self._client, self._on_replaced, self._on_given_up = client, on_replaced, on_given_up
        self._starts_before = client.num_engine_starts - (client.ready is not None)
        self._watch_engine()

    def close(self) -> None:
        """Stop watching: the server is shutting down."""
        self._closed = True
        for task in self._tasks:
            task.cancel()

    def _watch_engine(self) -> None:
        engine, loop = self.engine, asyncio.get_running_loop()

        def on_death(message: str) -> None:
            if engine is self.engine and not self._closed:
                loop.call_later(LAST_MESSAGE_S, self._on_death, message)

        engine.watch(loop, on_death)

    def _on_death(self, message: str) -> None:
        client = self._client
        if client is None or self._closed:
            return
        message = client.failure or message
        if client.num_engine_starts == self._starts_before or self._num_restarts >= MAX_RESTARTS:
            client.fail(message)
            self._on_given_up(message)
            return
        if asyncio.get_running_loop().time() - self._ready_at > STABLE_S:
            self._num_restarts = 0
        self._ready_at = math.inf
        self._num_restarts += 1
        client.fail(f"{message} It is being restarted.")
        client.failure = f"{message.removesuffix(' It is being restarted.')} It is being restarted."
        log.error("%s It is being restarted (restart %d).", message, self._num_restarts)
        for waiting in self._tasks:  # For the engine that has died.
            waiting.cancel()
        task = asyncio.get_running_loop().create_task(self._replace())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _replace(self) -> None:
        if self._num_restarts > 1:
            await asyncio.sleep(min(FIRST_PAUSE_S * 2 ** (self._num_restarts - 2), MAX_PAUSE_S))
        await asyncio.to_thread(self.engine.stop)
        if self._closed or self._client is None:
            return
        try:
            self.engine = self._start()
        except EngineUnavailable as error:
            self._client.failure = None  # Of the engine before.
            self._on_death(error.message)
            return
        self._client.reconnect(self.engine.channel(0))
        self._on_replaced(self.engine)
        self._watch_engine()
        await self._client.wait_ready_again()
        self._ready_at = asyncio.get_running_loop().time()
        log.info("The engine is ready again.")
