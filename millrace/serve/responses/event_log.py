"""Events of responses that are streamed and generated in the background: written to the database as they form, and read
from there by whoever asks, also after a disconnect, at any front."""

from __future__ import annotations

import asyncio
import math
import sqlite3
import time
from collections.abc import AsyncIterator, Callable

import msgspec

from millrace.errors import BadRequest
from millrace.serve.http.event_stream import EventStream, TextHolder
from millrace.serve.http.json_answer import encode, escape_lines
from millrace.serve.responses.schemas import ResponseAnswer
from millrace.serve.responses.store import OPEN, get_response, is_unstreamed, status_of
from millrace.serve.state import FrontState

WRITE_S = 0.05
"""Events are written this often."""
READ_S = 0.1
"""Readers look for new events this often."""
KEEP_ALIVE_S = 15.0
KEEP_ALIVE = b": waiting\n\n"
_END = b"\n\n"
_TERMINAL = (b"event: response.completed", b"event: response.incomplete", b"event: error", b"event: response.failed")


class StoredStream(EventStream):
    """Takes the place of a client's connection: frames wait here until `write_events` stores them."""

    __slots__ = ("_begun", "_frames")

    def __init__(self) -> None:  # There is no connection, so nothing of the base is set up.
        self._frames: list[bytes] = []
        self._preamble = b""
        self._begun = self.has_comments = False
        self.closed = self.paused = self.direct = False

    @property
    def started(self) -> bool:
        """An error is always an event: nobody waits for a plain response."""
        return True

    @property
    def is_gone(self) -> bool:
        return False

    def begin_with(self, frames: bytes, holders: list[TextHolder], on_slow: Callable[[int], None]) -> None:
        self._preamble = frames

    def send(self, frames: bytes) -> None:
        self._frames.append(frames if self._begun else self._preamble + frames)
        self._begun = True

    def end(self, frames: bytes) -> None:
        self.send(frames)

    def close(self) -> None:
        self.closed = True

    def take(self) -> list[bytes]:
        """The events since the last call. An event has no empty line inside."""
        events = b"".join(self._frames).split(_END)[:-1]
        self._frames.clear()
        return [event + _END for event in events]


async def write_events(state: FrontState, response_id: str, stream: StoredStream) -> None:
    """Store events until this is cancelled."""
    while True:
        await flush(state, response_id, stream)
        await asyncio.sleep(WRITE_S)


async def flush(state: FrontState, response_id: str, stream: StoredStream) -> None:
    events = stream.take()
    if events:
        await state.store.run(_add, response_id, events)


def _add(database: sqlite3.Connection, response_id: str, events: list[bytes]) -> None:
    """Events are numbered in the order in which they were made, as their `sequence_number` is."""
    [count] = database.execute("SELECT COUNT(*) FROM response_events WHERE response_id = ?", (response_id,)).fetchone()
    database.executemany(
        "INSERT INTO response_events (response_id, number, frames) VALUES (?, ?, ?)",
        [(response_id, count + index, event) for index, event in enumerate(events)],
    )


def forget(database: sqlite3.Connection, response_id: str) -> None:
    """The response is generated from the beginning, or deleted."""
    database.execute("DELETE FROM response_events WHERE response_id = ?", (response_id,))


def fail_without_events(database: sqlite3.Connection, answer: ResponseAnswer) -> None:
    """The response failed before it began."""
    [count] = database.execute("SELECT COUNT(*) FROM response_events WHERE response_id = ?", (answer.id,)).fetchone()
    if count == 0:
        event = {"type": "response.failed", "sequence_number": 0, "response": answer}
        _add(database, answer.id, [b"event: response.failed\ndata: %b\n\n" % escape_lines(encode(event))])


def _after(database: sqlite3.Connection, response_id: str, owner: str, number: int) -> tuple[list[bytes], str]:
    """The events after this number, and the response's status."""
    status = status_of(database, response_id, owner)
    rows = database.execute(
        "SELECT frames FROM response_events WHERE response_id = ? AND number > ? ORDER BY number",
        (response_id, number),
    ).fetchall()
    return [bytes(row["frames"]) for row in rows], status


def _cancelled(database: sqlite3.Connection, response_id: str, owner: str, seen: int) -> bytes:
    """The last event of a response that was cancelled: it stands behind the stored ones. Else nothing."""
    [count] = database.execute("SELECT COUNT(*) FROM response_events WHERE response_id = ?", (response_id,)).fetchone()
    if status_of(database, response_id, owner) != "cancelled" or seen >= count:
        return b""
    answer = msgspec.json.decode(get_response(database, response_id, owner), type=ResponseAnswer)
    event = {"type": "response.cancelled", "sequence_number": count, "response": answer}
    return b"event: response.cancelled\ndata: %b\n\n" % escape_lines(encode(event))


async def follow(state: FrontState, response_id: str, owner: str, starting_after: int) -> AsyncIterator[bytes]:
    """Events after this number until the last one, as they are stored. An event of failure is the last but one."""
    seen, told = starting_after, -math.inf  # A response that waits is told at once, so that the HTTP head is sent.
    events, status = await state.store.run(_after, response_id, owner, seen)
    if not events and await state.store.run(is_unstreamed, response_id, owner):
        raise BadRequest(
            f"The response {response_id!r} has no stored events: it was not made with 'stream' and 'background'.",
            param="stream",
        )
    while True:
        if events:
            seen, told = seen + len(events), time.monotonic()
            yield b"".join(events)
            if events[-1].startswith(_TERMINAL):
                return
        elif status not in OPEN:
            yield await state.store.run(_cancelled, response_id, owner, seen)
            return
        elif time.monotonic() - told > KEEP_ALIVE_S:
            told = time.monotonic()
            yield KEEP_ALIVE
        was_open = status in OPEN
        await asyncio.sleep(READ_S)
        events, status = await state.store.run(_after, response_id, owner, seen)
        if was_open and status not in OPEN and not events:
            # The last events may be stored just after the response itself.
            await asyncio.sleep(4 * WRITE_S)
            events, status = await state.store.run(_after, response_id, owner, seen)
