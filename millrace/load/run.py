"""One run in one process: an open loop that sends at intended times, or a closed loop of clients without pauses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from millrace.load.client import Endpoint, request_body, send
from millrace.load.records import Record
from millrace.load.workload import LoadRequest

DRAIN_S = 120.0
"""How long requests may take after the last one was sent."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 5.0
"""Of a client in a closed loop whose request was refused."""


@dataclass(slots=True)
class Progress:
    """Counted while a run goes on, for a live view."""

    sent: int = 0
    ended: int = 0
    failed: int = 0
    events: int = 0


def is_refusal(record: Record) -> bool:
    """True if the server could not be reached or asked to come later."""
    return bool(record.error) and record.status in (0, 429, 502, 503, 504)


@dataclass(slots=True)
class Runner:
    endpoint: Endpoint
    drain_s: float = DRAIN_S
    progress: Progress = field(default_factory=Progress)
    records: list[Record] = field(default_factory=list)

    async def open_loop(self, requests: Iterator[LoadRequest], start: float) -> None:
        """Send each request at its intended time, whatever happens to those before. `start` is on `time.monotonic`."""
        tasks: set[asyncio.Task[Record | None]] = set()
        async with self._session() as session:
            for request in requests:
                await asyncio.sleep(max(0.0, start + request.at_s - time.monotonic()))
                task = asyncio.create_task(self._converse(session, request, start, request.at_s))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            await self._drain(tasks)

    async def closed_loop(self, requests: Iterator[LoadRequest], concurrency: int, start: float, until: float) -> None:
        """`concurrency` clients, each of which sends its next request when the last was answered, until this time. A
        client that was refused pauses first, longer each time: a server that is gone is not hammered."""
        async with self._session() as session:

            async def client() -> None:
                await asyncio.sleep(max(0.0, start - time.monotonic()))
                pause_s = FIRST_PAUSE_S
                while time.monotonic() < until:
                    last = await self._converse(session, next(requests), start, time.monotonic() - start)
                    if last is None or not is_refusal(last):
                        pause_s = FIRST_PAUSE_S
                        continue
                    await asyncio.sleep(min(pause_s, max(0.0, until - time.monotonic())))
                    pause_s = min(2 * pause_s, MAX_PAUSE_S)

            await self._drain({asyncio.create_task(client()) for _ in range(concurrency)}, until=until)

    def _session(self) -> aiohttp.ClientSession:
        timeout = aiohttp.ClientTimeout(total=self.endpoint.timeout_s)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
        return aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=1 << 16)

    async def _drain(self, tasks: Collection[asyncio.Task[Any]], until: float = 0.0) -> None:
        if tasks:
            remaining = self.drain_s + max(0.0, until - time.monotonic())
            _, open_tasks = await asyncio.wait(set(tasks), timeout=remaining)
            for task in open_tasks:
                task.cancel()
            await asyncio.gather(*open_tasks, return_exceptions=True)

    async def _converse(
        self, session: aiohttp.ClientSession, request: LoadRequest, start: float, intended_s: float
    ) -> Record | None:
        """Returns the record of the last turn."""
        record = None
        messages = [{"role": "system", "content": request.system}] if request.system else []
        for turn, (text, max_tokens) in enumerate(zip(request.turns, request.max_tokens, strict=True)):
            messages.append({"role": "user", "content": text})
            record = Record(request.number, turn, intended_s)
            self.records.append(record)
            self.progress.sent += 1
            body = request_body(
                self.endpoint,
                messages,
                max_tokens,
                model=request.model,
                schema=request.schema,
                priority=request.priority,
            )
            answer = await send(session, self.endpoint, body, record, start, self._on_event)
            self.progress.ended += 1
            self.progress.failed += bool(record.error)
            if record.error:
                break
            messages.append({"role": "assistant", "content": answer})
            intended_s = time.monotonic() - start  # The next turn is due when the answer is there.
        return record

    def _on_event(self) -> None:
        self.progress.events += 1


async def watched(run: asyncio.Task[None], tick: Callable[[], None], every_s: float = 0.5) -> None:
    """Wait for a run, calling `tick` meanwhile."""
    while not run.done():
        await asyncio.wait({run}, timeout=every_s)
        tick()
    run.result()
