"""Cheap clients that hold many streams open: each sends a chat request, counts events without parsing them, and sends
the next request on the same connection. They run in processes of their own."""

from __future__ import annotations

import asyncio
import json
import time
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Protocol, cast

END = b"0\r\n\r\n"
HEAD = b"HTTP/1.1 200"
FRAME = b"data: {"
COMMENT = b"\r\n: "
FULL_LENGTH = b'"length"'
"""The finish reason in the last event of a complete answer."""
WORDS = "the river turns the wheel and the wheel turns the stone that grinds the corn of the whole valley ".split()
PROMPT_WORDS = 100
TURN = "######"
"""Placeholder for the number of the request, with the same number of digits."""
CONNECTING_AT_ONCE = 64
CONNECT_TRIES = 5
MAX_ERROR_CHARS = 300


class Schedule(Protocol):
    """Four times on `time.monotonic`, shared by all processes; 0 until they are known."""

    def __getitem__(self, index: int) -> float: ...


BEGIN, FROM, TO, UNTIL = range(4)
"""When the first requests are sent; begin and end of the measured interval; when the clients disconnect."""


@dataclass(slots=True)
class Tally:
    """Counts and times (in seconds) of one client process."""

    requests: int = 0
    """Complete answers that ended within the measured interval."""
    frames: int = 0
    """Events with text that arrived within it."""
    whole: int = 0
    whole_frames: int = 0
    """Complete answers since the first request, and their events; their ratio is events per answer."""
    errors: int = 0
    first_error: str = ""
    first_s: array[float] = field(default_factory=lambda: array("d"))
    """TTFT of first events within the measured interval, without the first request of each stream."""
    burst_s: array[float] = field(default_factory=lambda: array("d"))
    """TTFT of the first request of each stream; these were all sent at once."""
    unanswered_s: array[float] = field(default_factory=lambda: array("d"))
    """Waiting times so far of requests without an event at the end of the interval."""
    gap_s: array[float] = field(default_factory=lambda: array("d"))
    """Times between arrivals of events of the same answer."""
    merged: int = 0
    """Events that arrived together with the previous one: gaps of 0 that are not in `gap_s`."""

    def fail(self, text: str) -> None:
        self.errors += 1
        self.first_error = self.first_error or text[:MAX_ERROR_CHARS]


def merge(tallies: Iterable[Tally]) -> Tally:
    total = Tally()
    for tally in tallies:
        total.requests += tally.requests
        total.frames += tally.frames
        total.whole += tally.whole
        total.whole_frames += tally.whole_frames
        total.errors += tally.errors
        total.first_error = total.first_error or tally.first_error
        total.first_s.extend(tally.first_s)
        total.burst_s.extend(tally.burst_s)
        total.unanswered_s.extend(tally.unanswered_s)
        total.gap_s.extend(tally.gap_s)
        total.merged += tally.merged
    return total


def chat_request(model: str, num_tokens: int, number: int, key: str = "") -> tuple[bytes, bytes]:
    """A request of about a hundred words, different for each stream, in two parts. The six-digit request number goes
    between them, at the start of the text, so that neither prefix cache nor tokenizer cache hits."""
    text = " ".join(WORDS[(number * 7 + i * (number % 5 + 1)) % len(WORDS)] for i in range(PROMPT_WORDS))
    body = json.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": f"{TURN} {number}: {text}"}],
            "max_tokens": num_tokens,
            "stream": True,
            "ignore_eos": True,
        }
    ).encode()
    fields = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    fields += f"\r\nAuthorization: Bearer {key}" if key else ""
    before, after = body.split(TURN.encode())
    return f"POST /v1/chat/completions HTTP/1.1\r\n{fields}\r\n\r\n".encode() + before, after


class Stream(asyncio.Protocol):
    """One connection: one request at a time, the next as soon as the last has ended."""

    __slots__ = ("_arrived_at", "_frames", "_from", "_last", "_request", "_sent_at", "_tally", "_to", "_transport",
                 "_turn", "is_over")  # fmt: skip

    def __init__(self, tally: Tally, request: tuple[bytes, bytes]) -> None:
        self._tally, self._request = tally, request
        self._transport: asyncio.Transport | None = None
        self._sent_at = self._arrived_at = 0.0
        self._from = self._to = 0.0
        self._turn = 0
        self._frames = 0
        self._last = b""
        self.is_over = False
        """True once the connection may end without counting as an error."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def begin(self, schedule: Schedule) -> None:
        self._from, self._to = schedule[FROM], schedule[TO]
        self._send()

    def _send(self) -> None:
        assert self._transport is not None
        self._turn += 1
        self._sent_at, self._arrived_at = time.monotonic(), 0.0
        self._frames = 0
        self._last = b""
        self._transport.write((b"%06d" % (self._turn % 1_000_000)).join(self._request))

    def data_received(self, data: bytes) -> None:
        now, tally = time.monotonic(), self._tally
        frames = data.count(FRAME)
        self._frames += frames
        within = self._from <= now < self._to
        if not frames and not data.endswith(END) and (data.startswith(HEAD) or COMMENT in data):
            return  # The stream waits: its head, or a comment.
        if not self._arrived_at:
            self._on_first(data, now, within)
        elif within and frames:
            tally.gap_s.append(now - self._arrived_at)
            tally.merged += frames - 1
        if within:
            tally.frames += frames
        self._arrived_at = now
        if data.endswith(END) or (self._last[-4:] + data[:5]).endswith(END):
            self._on_end(self._last + data, within)
        else:
            self._last = data

    def _on_first(self, data: bytes, now: float, within: bool) -> None:
        if data.startswith(b"HTTP/") and not data.startswith(HEAD):
            # The end of an error response is not parsed, so the connection cannot be reused.
            self._tally.fail(data.decode(errors="replace"))
            self.is_over = True
            self.close()
        elif self._turn == 1:
            self._tally.burst_s.append(now - self._sent_at)
        elif within:
            self._tally.first_s.append(now - self._sent_at)

    def _on_end(self, end: bytes, within: bool) -> None:
        tally = self._tally
        if FULL_LENGTH in end:
            tally.requests += within
            tally.whole += 1
            tally.whole_frames += self._frames
        else:
            tally.fail(end[-MAX_ERROR_CHARS:].decode(errors="replace"))
        if not self.is_over:
            self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.is_over:
            self._tally.fail(f"the connection was lost after {self._frames} events: {exc}")

    def note_unanswered(self, now: float) -> None:
        if not self._arrived_at and not self.is_over:
            self._tally.unanswered_s.append(now - self._sent_at)

    def close(self) -> None:
        self.is_over = True
        if self._transport is not None:
            self._transport.abort()


async def _open(port: int, tally: Tally, request: tuple[bytes, bytes]) -> Stream:
    loop = asyncio.get_running_loop()
    for attempt in range(CONNECT_TRIES):
        try:
            _, stream = await loop.create_connection(lambda: Stream(tally, request), "127.0.0.1", port)
            return stream
        except OSError:  # The backlog is full; try again.
            if attempt == CONNECT_TRIES - 1:
                raise
            await asyncio.sleep(0.2 * (attempt + 1))
    raise AssertionError("the last attempt returns or raises")


async def open_streams(
    port: int, model: str, numbers: range, num_tokens: int, tally: Tally, key: str = ""
) -> list[Stream]:
    streams: list[Stream] = []
    for first in range(0, len(numbers), CONNECTING_AT_ONCE):
        some = numbers[first : first + CONNECTING_AT_ONCE]
        streams += await asyncio.gather(*(_open(port, tally, chat_request(model, num_tokens, n, key)) for n in some))
    return streams


async def hold_streams(streams: list[Stream], tally: Tally, schedule: Schedule) -> None:
    """Wait for the begin time, then keep every stream busy until the end."""
    while not schedule[BEGIN]:
        await asyncio.sleep(0.01)
    await asyncio.sleep(max(0.0, schedule[BEGIN] - time.monotonic()))
    for stream in streams:
        stream.begin(schedule)
    await asyncio.sleep(max(0.0, schedule[TO] - time.monotonic()))
    now = time.monotonic()
    for stream in streams:
        stream.note_unanswered(now)
    await asyncio.sleep(max(0.0, schedule[UNTIL] - time.monotonic()))
    for stream in streams:
        stream.close()


def run_clients(
    port: int, model: str, numbers: range, num_tokens: int, schedule: Schedule, out: Connection, key: str = ""
) -> None:
    """Main of a client process: sends an empty tally on `out` when its streams are open, and its tally at the end."""
    import uvloop

    from millrace.serve.app import allow_many_connections

    allow_many_connections()

    async def main() -> Tally:
        tally = Tally()
        streams = await open_streams(port, model, numbers, num_tokens, tally, key)
        out.send(Tally())
        await hold_streams(streams, tally, schedule)
        return tally

    out.send(uvloop.run(main()))
