"""Sends spans to an OTLP/HTTP receiver in batches. A receiver that is slow or gone costs spans, never requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque

import aiohttp

from millrace.observe.tracing.otlp import Span, encode_request
from millrace.version import __version__

log = logging.getLogger("millrace.observe")

MAX_QUEUED = 8192
MAX_BATCH = 512
FLUSH_EVERY_S = 1.0
TIMEOUT_S = 5.0
LAST_FLUSH_S = 5.0
"""How long the last spans may hold up the end of a front."""
TRIES = 3


class SpanExporter:
    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/") + ("" if url.rstrip("/").endswith("/v1/traces") else "/v1/traces")
        self._queue: deque[Span] = deque()
        self._has_failed = False
        self.num_sent = self.num_dropped = 0

    def add(self, spans: list[Span]) -> None:
        if len(self._queue) + len(spans) > MAX_QUEUED:
            self.num_dropped += len(spans)
            return
        self._queue.extend(spans)

    async def run(self) -> None:
        """Until cancelled; then one last attempt to send what is left."""
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            try:
                while True:
                    await asyncio.sleep(FLUSH_EVERY_S)
                    await self.flush(session)
            finally:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LAST_FLUSH_S):
                        await self.flush(session, tries=1)

    async def flush(self, session: aiohttp.ClientSession, tries: int = TRIES) -> None:
        while self._queue:
            batch = [self._queue.popleft() for _ in range(min(MAX_BATCH, len(self._queue)))]
            body = encode_request(batch, {"service.name": "millrace", "service.version": __version__}, __version__)
            if await self._send(session, body, tries):
                self.num_sent += len(batch)
            else:
                self.num_dropped += len(batch)

    async def _send(self, session: aiohttp.ClientSession, body: bytes, tries: int) -> bool:
        problem = ""
        for attempt in range(tries):
            if attempt:
                await asyncio.sleep(0.2 * 2**attempt)
            try:
                headers = {"Content-Type": "application/x-protobuf"}
                async with session.post(self._url, data=body, headers=headers) as answer:
                    if answer.status < 300:
                        self._has_failed = False
                        return True
                    problem = f"HTTP {answer.status}"
                    if answer.status < 500 and answer.status != 429:
                        break
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                problem = str(error) or type(error).__name__
        if not self._has_failed:  # Once per outage.
            log.warning("Spans cannot be sent to %s: %s. They are dropped until it answers.", self._url, problem)
        self._has_failed = True
        return False
