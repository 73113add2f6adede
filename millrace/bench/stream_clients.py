"""Clients that hold many streams open at little cost: each sends a chat request, counts what comes back without reading
it, and sends the next on the same connection. One process of them loads a front from outside."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from typing import cast

END = b"0\r\n\r\n"
FRAME = b"data: {"
WORDS = "the river turns the wheel and the wheel turns the stone that grinds the corn of the whole valley ".split()
PROMPT_WORDS = 100


@dataclass(slots=True)
class Tally:
    """What one process of clients saw."""

    requests: int = 0
    frames: int = 0
    errors: int = 0
    first_s: list[float] = field(default_factory=list)
    """Seconds to the first event of each request."""


def chat_request(model: str, num_tokens: int, number: int) -> bytes:
    """About a hundred words, different for each stream, so that no cache answers for the tokenizer."""
    text = " ".join(WORDS[(number * 7 + i * (number % 5 + 1)) % len(WORDS)] for i in range(PROMPT_WORDS))
    body = json.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": f"{number}: {text}"}],
            "max_tokens": num_tokens,
            "stream": True,
            "ignore_eos": True,
        }
    ).encode()
    fields = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return f"POST /v1/chat/completions HTTP/1.1\r\n{fields}\r\n\r\n".encode() + body


class Stream(asyncio.Protocol):
    def __init__(self, tally: Tally, request: bytes, ended: asyncio.Future[None]) -> None:
        self._tally, self._request, self._ended = tally, request, ended
        self._transport: asyncio.Transport | None = None
        self._sent_at = 0.0
        self._has_begun = False
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def send(self) -> None:
        assert self._transport is not None
        self._sent_at = time.monotonic()
        self._has_begun = False
        self._tail = b""
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        tally = self._tally
        if not self._has_begun:
            self._has_begun = True
            tally.first_s.append(time.monotonic() - self._sent_at)
            if not data.startswith(b"HTTP/1.1 200"):
                tally.errors += 1
        tally.frames += data.count(FRAME)
        if data.endswith(END) or (self._tail + data[:5]).endswith(END):
            tally.requests += 1
            self.send()
        else:
            self._tail = data[-5:]

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._ended.done():
            self._tally.errors += 1

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


async def hold_streams(port: int, model: str, numbers: range, num_tokens: int, go: Event, stop: Event) -> Tally:
    """Open the connections, wait for `go`, stream until `stop`."""
    loop, tally = asyncio.get_running_loop(), Tally()
    ended: asyncio.Future[None] = loop.create_future()
    streams = []
    for number in numbers:
        request = chat_request(model, num_tokens, number)
        _, stream = await loop.create_connection(lambda r=request: Stream(tally, r, ended), "127.0.0.1", port)  # type: ignore[misc]
        streams.append(stream)
    while not go.is_set():
        await asyncio.sleep(0.01)
    for stream in streams:
        stream.send()
    while not stop.is_set():
        await asyncio.sleep(0.05)
    ended.set_result(None)
    for stream in streams:
        stream.close()
    return tally


def run_clients(
    port: int, model: str, numbers: range, num_tokens: int, go: Event, stop: Event, opened: Event, out: Connection
) -> None:
    import uvloop

    async def main() -> Tally:
        opened.set()
        return await hold_streams(port, model, numbers, num_tokens, go, stop)

    out.send(uvloop.run(main()))
