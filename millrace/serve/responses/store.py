"""Stored responses. Every function runs inside one transaction."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

import msgspec

from millrace.errors import BadRequest, Conflict, NotFound
from millrace.serve.generate.messages import Message
from millrace.serve.http.queries import Page
from millrace.serve.responses.items import messages_of
from millrace.serve.responses.references import forget_ids, keep_ids
from millrace.serve.responses.schemas import InputItemList, ResponseAnswer
from millrace.serve.responses.schemas_items import InputItem, OutputItem
from millrace.serve.stored.kept_salts import kept_salt

OPEN = ("queued", "in_progress", "cancelling")
MAX_TURNS = 1000
"""Longest chain of previous responses."""

_items = msgspec.json.Decoder(list[InputItem])
_answer = msgspec.json.Decoder(ResponseAnswer)
_output = msgspec.json.Decoder(list[OutputItem])


def add_response(
    database: sqlite3.Connection, answer: ResponseAnswer, owner: str, items: list[InputItem], request: bytes | None
) -> None:
    """`request` is set only for a background response that is still to be generated."""
    database.execute(
        "INSERT OR REPLACE INTO responses (id, owner, created_at, previous_id, status, background, body, input,"
        " output, request) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            *(answer.id, owner, answer.created_at, answer.previous_response_id, answer.status),
            *(request is not None, msgspec.json.encode(answer), msgspec.json.encode(items)),
            *(msgspec.json.encode(answer.output), request),
        ),
    )
    keep_ids(database, answer.id, answer.output)


def end_response(database: sqlite3.Connection, answer: ResponseAnswer) -> None:
    """Store the end of a background response; no effect if it was deleted meanwhile."""
    ended = database.execute(
        "UPDATE responses SET status = ?, body = ?, output = ?, request = NULL WHERE id = ? AND request IS NOT NULL",
        (answer.status, msgspec.json.encode(answer), msgspec.json.encode(answer.output), answer.id),
    )
    if ended.rowcount:
        keep_ids(database, answer.id, answer.output)


def _row(database: sqlite3.Connection, response_id: str, owner: str, param: str = "response_id") -> sqlite3.Row:
    row: sqlite3.Row | None = database.execute(
        "SELECT * FROM responses WHERE id = ? AND owner = ?", (response_id, owner)
    ).fetchone()
    if row is None:
        raise NotFound(
            f"There is no stored response {response_id[:200]!r}: it was deleted, not stored, or never created.",
            param=param,
        )
    return row


def get_response(database: sqlite3.Connection, response_id: str, owner: str) -> bytes:
    return bytes(_row(database, response_id, owner)["body"])


def status_of(database: sqlite3.Connection, response_id: str, owner: str) -> str:
    return str(_row(database, response_id, owner)["status"])


def is_unstreamed(database: sqlite3.Connection, response_id: str, owner: str) -> bool:
    """True if the response has no stored events and will have none."""
    request = _row(database, response_id, owner)["request"]
    if request is not None and msgspec.json.decode(request).get("stream"):
        return False
    return database.execute("SELECT 1 FROM response_events WHERE response_id = ?", (response_id,)).fetchone() is None


def delete_response(database: sqlite3.Connection, response_id: str, owner: str) -> None:
    _row(database, response_id, owner)
    database.execute("DELETE FROM responses WHERE id = ?", (response_id,))
    database.execute("DELETE FROM response_events WHERE response_id = ?", (response_id,))
    forget_ids(database, response_id)


def cancel_response(database: sqlite3.Connection, response_id: str, owner: str) -> bytes:
    row = _row(database, response_id, owner)
    if row["request"] is not None:
        body = _answer.decode(row["body"])
        body.status = "cancelled"
        end_response(database, body)
        return msgspec.json.encode(body)
    if row["status"] == "cancelled":
        return bytes(row["body"])
    raise Conflict(
        f"The response {response_id!r} is {row['status']}; only a running response created with 'background' can be"
        " cancelled here. DELETE /v1/requests/<id> cancels any running request.",
        param="response_id",
    )


def conversation(database: sqlite3.Connection, response_id: str, owner: str) -> list[Message]:
    """All messages up to and including a response, oldest first."""
    turns: list[list[Message]] = []
    wanted: str | None = response_id
    while wanted is not None:
        row = _row(database, wanted, owner, "previous_response_id")
        if row["request"] is not None:
            raise Conflict(
                f"The response {wanted!r} is still being generated; continue it when it has ended.",
                param="previous_response_id",
            )
        if len(turns) == MAX_TURNS:
            raise BadRequest(
                f"The conversation has more than {MAX_TURNS} turns; start a new one.", param="previous_response_id"
            )
        turns.append(messages_of([*_items.decode(row["input"]), *_output.decode(row["output"])]))
        wanted = row["previous_id"]
    return [message for turn in reversed(turns) for message in turn]


def input_items(database: sqlite3.Connection, response_id: str, owner: str, page: Page) -> InputItemList:
    items = _items.decode(_row(database, response_id, owner)["input"])
    if page.newest_first:
        items.reverse()
    if page.after is not None:
        ids = [item.id for item in items]
        if page.after not in ids:
            raise BadRequest(f"after is {page.after[:200]!r}, which is not an item of this response.", param="after")
        items = items[ids.index(page.after) + 1 :]
    shown = items[: page.limit]
    first, last = (shown[0].id, shown[-1].id) if shown else ("", "")
    return InputItemList(
        "list", [msgspec.Raw(msgspec.json.encode(item)) for item in shown], first, last, len(items) > len(shown)
    )


@dataclass(frozen=True, slots=True)
class OpenResponse:
    id: str
    owner: str
    request: bytes
    answer: ResponseAnswer
    """Its present state."""
    salt: str
    """That a gateway sent with it."""


def open_responses(database: sqlite3.Connection) -> list[OpenResponse]:
    rows = database.execute(
        "SELECT id, owner, request, body FROM responses WHERE background = 1 AND request IS NOT NULL ORDER BY number"
    ).fetchall()
    return [
        OpenResponse(
            row["id"],
            row["owner"],
            bytes(row["request"]),
            _answer.decode(row["body"]),
            kept_salt(database, row["id"]),
        )
        for row in rows
    ]


def mark_started(database: sqlite3.Connection, answer: ResponseAnswer) -> None:
    database.execute(
        "UPDATE responses SET status = ?, body = ? WHERE id = ? AND request IS NOT NULL",
        (answer.status, msgspec.json.encode(answer), answer.id),
    )
