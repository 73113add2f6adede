"""Runs batches and responses created with `background`, for which no client waits.

Of all processes that share a data directory, only the holder of the lock file does this. The kernel releases the lock
when that process ends, in whatever way; another process then continues from the state in the database.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiohttp import web

from millrace.errors import MillraceError
from millrace.serve.generate.work import Prepare
from millrace.serve.state import FrontState
from millrace.serve.stored.batch_run import RETRY_S, BatchRun
from millrace.serve.stored.batch_store import OpenBatch, open_batches

if TYPE_CHECKING:
    from filelock import FileLock

POLL_S = 2.0
"""Interval at which the database is read for work that other processes stored."""
EXPIRY_CHECK_S = 3600.0
MAX_BATCHES = 8
"""Batches that run at once; the others wait."""
MAX_TASKS = 64
"""Background responses that run at once."""
LOCK = "background.lock"

log = logging.getLogger("millrace.serve")


@dataclass(frozen=True, slots=True)
class BackgroundTask:
    """Stored work other than a batch."""

    id: str
    run: Callable[[], Coroutine[Any, Any, None]]


OpenTasks = Callable[[FrontState, sqlite3.Connection], list[BackgroundTask]]
"""Reads the tasks that are not finished, inside one transaction."""


class BackgroundRunner:
    def __init__(self, state: FrontState, endpoints: Mapping[str, Prepare], open_tasks: OpenTasks) -> None:
        self._state = state
        self.endpoints = endpoints
        """The endpoints that a batch can call, each with the function that prepares a request."""
        self._open_tasks = open_tasks
        self._wakeup = asyncio.Event()
        self._lock: FileLock | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._runs: dict[str, BatchRun] = {}
        self._next_expiry_check = 0.0
        self._slots = asyncio.Semaphore(state.config.server.batch_lines)

    def wake(self) -> None:
        """Look at the database now: something was stored or cancelled."""
        self._wakeup.set()

    async def run(self) -> None:
        while True:
            store = self._state.store
            if store.is_in_use and not self._state.draining:
                try:
                    if await store.in_thread(self._has_lock):
                        await self._sweep()
                        await self._delete_expired()
                except MillraceError as error:
                    log.error("Batches and background responses are paused: %s", error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S if store.is_in_use else None):
                    await self._wakeup.wait()
            self._wakeup.clear()

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        if self._lock is not None:
            self._lock.release()

    def _has_lock(self) -> bool:
        """Try to take the lock without waiting. Runs in the store's thread."""
        from filelock import FileLock, Timeout  # 20 ms to import, and most servers store nothing.

        if self._lock is None:
            # The store's thread acquires it and the event loop's thread releases it.
            self._lock = FileLock(self._state.store.directory / LOCK, thread_local=False)
        if not self._lock.is_locked:
            try:
                self._lock.acquire(blocking=False)
            except Timeout:
                return False
        return True

    async def _sweep(self) -> None:
        """Start open work that is not running; stop what was cancelled or deleted."""
        batches, tasks = await self._state.store.run(lambda db: (open_batches(db), self._open_tasks(self._state, db)))
        for batch in batches:
            if batch.id not in self._tasks and len(self._runs) < MAX_BATCHES:
                self._start_batch(batch)
            elif batch.status == "cancelling" and batch.id in self._runs:
                self._runs[batch.id].stop.set()
        open_ids = {task.id for task in tasks}
        for task_id, running in self._tasks.items():
            if task_id not in self._runs and task_id not in open_ids:
                running.cancel()
        for task in tasks:
            if task.id not in self._tasks and len(self._tasks) < MAX_TASKS + MAX_BATCHES:
                self._start(task.id, task.run())

    async def _delete_expired(self) -> None:
        """Delete expired files and responses, once per `EXPIRY_CHECK_S`."""
        if time.monotonic() >= self._next_expiry_check:
            self._next_expiry_check = time.monotonic() + EXPIRY_CHECK_S
            await self._state.store.run(self._state.store.forget_expired)

    def _start_batch(self, batch: OpenBatch) -> None:
        prepare = self.endpoints[batch.endpoint]
        run = self._runs[batch.id] = BatchRun(self._state, batch, prepare, self._slots)
        self._start(batch.id, run.run())

    def _start(self, task_id: str, work: Coroutine[Any, Any, None]) -> None:
        async def guarded() -> None:
            try:
                await work
            except Exception:
                log.exception("%s failed; it will be retried.", task_id)
                await asyncio.sleep(RETRY_S)
            finally:
                self._tasks.pop(task_id, None)
                self._runs.pop(task_id, None)
                self.wake()

        self._tasks[task_id] = asyncio.create_task(guarded())


BACKGROUND = web.AppKey("background", BackgroundRunner)


async def run_background(app: web.Application) -> AsyncIterator[None]:
    """Cleanup context of the application: runs the background work until it shuts down."""
    background = app[BACKGROUND]
    task = asyncio.create_task(background.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await background.close()
