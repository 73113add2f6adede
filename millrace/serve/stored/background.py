"""What runs without a client waiting: batches, and responses made with `background`.

One process does it for everybody who shares the data directory: the one that holds the lock file. The kernel frees the
lock when that process ends, however it ends, and another goes on from what the database says.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import logging
import os
import time
from collections.abc import AsyncIterator, Coroutine
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from millrace.errors import EngineUnavailable, MillraceError, Overloaded
from millrace.serve.generate.work import Prepare, chat_work, completion_work, unattended_answer
from millrace.serve.responses.translate import response_work
from millrace.serve.responses.write import failed
from millrace.serve.state import FrontState
from millrace.serve.stored.batch_run import RETRY_S, BatchRun
from millrace.serve.stored.batch_store import OpenBatch, open_batches
from millrace.serve.stored.response_store import OpenResponse, end_response, mark_started, open_responses

POLL_S = 2.0
"""How often the database is asked for what other processes put there."""
FORGET_S = 3600.0
MAX_BATCHES = 8
"""Batches that run at once; further ones wait for their turn."""
MAX_RESPONSES = 64
LOCK = "background.lock"

log = logging.getLogger("millrace.serve")


def batch_endpoints(owner: str) -> dict[str, Prepare]:
    """The endpoints that a batch may be for."""
    return {
        "/v1/chat/completions": chat_work,
        "/v1/completions": completion_work,
        "/v1/responses": partial(response_work, owner=owner),
    }


class Background:
    def __init__(self, state: FrontState) -> None:
        self._state = state
        self._wakeup = asyncio.Event()
        self._lock_fd: int | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._runs: dict[str, BatchRun] = {}
        self._forget_at = 0.0
        self._slots = asyncio.Semaphore(state.config.server.batch_lines)

    def wake(self) -> None:
        """Something was stored that concerns us."""
        self._wakeup.set()

    async def run(self) -> None:
        while True:
            store = self._state.store
            if store.is_in_use and not self._state.draining:
                try:
                    if await store.in_thread(self._has_lock):
                        await self._sweep()
                        await self._forget()
                except MillraceError as error:
                    log.error("Batches and background responses wait: %s", error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S if store.is_in_use else None):
                    await self._wakeup.wait()
            self._wakeup.clear()

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _has_lock(self) -> bool:
        if self._lock_fd is None:
            fd = os.open(self._state.store.directory / LOCK, os.O_CREAT | os.O_RDWR, 0o644)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                return False
            self._lock_fd = fd
        return True

    async def _sweep(self) -> None:
        """Start what is open and not running; stop what was cancelled or deleted."""
        batches, responses = await self._state.store.run(lambda db: (open_batches(db), open_responses(db)))
        for batch in batches:
            if batch.id not in self._tasks and len(self._runs) < MAX_BATCHES:
                self._start_batch(batch)
            elif batch.status == "cancelling" and batch.id in self._runs:
                self._runs[batch.id].stop.set()
        wanted = {response.id for response in responses}
        for task_id, task in self._tasks.items():
            if task_id not in self._runs and task_id not in wanted:
                task.cancel()
        for response in responses:
            if response.id not in self._tasks and len(self._tasks) < MAX_RESPONSES + MAX_BATCHES:
                self._start(response.id, self._response(response))

    async def _forget(self) -> None:
        """Now and then, remove what has expired."""
        if time.monotonic() >= self._forget_at:
            self._forget_at = time.monotonic() + FORGET_S
            await self._state.store.run(self._state.store.forget_expired)

    def _start_batch(self, batch: OpenBatch) -> None:
        prepare = batch_endpoints(batch.owner)[batch.endpoint]
        run = self._runs[batch.id] = BatchRun(self._state, batch, prepare, self._slots)
        self._start(batch.id, run.run())

    def _start(self, task_id: str, work: Coroutine[Any, Any, None]) -> None:
        async def guarded() -> None:
            try:
                await work
            except Exception:
                log.exception("%s stopped; it will be taken up again.", task_id)
                await asyncio.sleep(RETRY_S)
            finally:
                self._tasks.pop(task_id, None)
                self._runs.pop(task_id, None)
                self.wake()

        self._tasks[task_id] = asyncio.create_task(guarded())

    # ── background responses ──────────────────────────────────────────────────────────────────────────────────────────
    async def _response(self, response: OpenResponse) -> None:
        state, store = self._state, self._state.store
        opening = msgspec.structs.replace(response.answer, status="in_progress")
        await store.run(mark_started, opening)
        while not state.draining:
            try:
                received = time.monotonic()
                work = await response_work(state, response.request, received, owner=response.owner, queued=opening)
                work = dataclasses.replace(work, generation=dataclasses.replace(work.generation, stream=False))
                await unattended_answer(state, work, response.owner, response.id, "/v1/responses", received)
                return
            except (EngineUnavailable, Overloaded):
                await asyncio.sleep(RETRY_S)
            except MillraceError as error:
                await store.run(end_response, failed(opening, error))
                return


BACKGROUND = web.AppKey("background", Background)


async def in_background(app: web.Application) -> AsyncIterator[None]:
    """Runs for as long as the application does."""
    background = app[BACKGROUND]
    task = asyncio.create_task(background.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await background.close()
