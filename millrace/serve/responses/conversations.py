"""Stored conversations: items that responses with `conversation` read and add to.

Every function but `new_conversation` runs inside one transaction.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence

import msgspec

from millrace.errors import BadRequest, NotFound
from millrace.serve.generate.messages import Message
from millrace.serve.http.ids import new_id
from millrace.serve.http.queries import Page
from millrace.serve.responses.items import messages_of
from millrace.serve.responses.schemas import ConversationAnswer, InputItemList
from millrace.serve.responses.schemas_items import InputItem, OutputItem

MAX_ITEMS = 10_000
"""Items of one conversation."""
_input = msgspec.json.Decoder(InputItem)
_output = msgspec.json.Decoder(OutputItem)


def create(
    database: sqlite3.Connection, owner: str, metadata: dict[str, str], items: Sequence[InputItem]
) -> ConversationAnswer:
    made = ConversationAnswer(id=new_id("conv_"), created_at=int(time.time()), metadata=metadata)
    database.execute(
        "INSERT INTO conversations (id, owner, created_at, metadata) VALUES (?, ?, ?, ?)",
        (made.id, owner, made.created_at, msgspec.json.encode(metadata)),
    )
    add_items(database, made.id, owner, items)
    return made


def get(
    database: sqlite3.Connection, conversation_id: str, owner: str, param: str = "conversation_id"
) -> ConversationAnswer:
    row = database.execute(
        "SELECT * FROM conversations WHERE id = ? AND owner = ?", (conversation_id, owner)
    ).fetchone()
    if row is None:
        raise NotFound(
            f"There is no conversation {conversation_id[:200]!r}: it was deleted or never made.", param=param
        )
    return ConversationAnswer(
        id=row["id"], created_at=row["created_at"], metadata=msgspec.json.decode(row["metadata"], type=dict[str, str])
    )


def relabel(
    database: sqlite3.Connection, conversation_id: str, owner: str, metadata: dict[str, str]
) -> ConversationAnswer:
    get(database, conversation_id, owner)
    database.execute(
        "UPDATE conversations SET metadata = ? WHERE id = ?", (msgspec.json.encode(metadata), conversation_id)
    )
    return get(database, conversation_id, owner)


def delete(database: sqlite3.Connection, conversation_id: str, owner: str) -> None:
    get(database, conversation_id, owner)
    database.execute("DELETE FROM conversation_items WHERE conversation_id = ?", (conversation_id,))
    database.execute("DELETE FROM conversations WHERE id = ?", (conversation_id,))


def add_items(
    database: sqlite3.Connection, conversation_id: str, owner: str, items: Sequence[InputItem]
) -> InputItemList:
    get(database, conversation_id, owner)
    encoded = [msgspec.json.encode(item) for item in items]
    _add(database, conversation_id, items, encoded, generated=False)
    first, last = (items[0].id, items[-1].id) if items else ("", "")
    return InputItemList("list", [msgspec.Raw(data) for data in encoded], first, last, False)


def continue_with(
    database: sqlite3.Connection,
    conversation_id: str,
    owner: str,
    items: Sequence[InputItem],
    output: Sequence[OutputItem],
) -> None:
    """Add a turn that was generated; no effect if the conversation was deleted meanwhile."""
    known = database.execute("SELECT 1 FROM conversations WHERE id = ? AND owner = ?", (conversation_id, owner))
    if known.fetchone() is not None:
        _add(database, conversation_id, items, [msgspec.json.encode(item) for item in items], generated=False)
        _add(database, conversation_id, output, [msgspec.json.encode(item) for item in output], generated=True)


def _add(
    database: sqlite3.Connection,
    conversation_id: str,
    items: Sequence[InputItem | OutputItem],
    encoded: list[bytes],
    *,
    generated: bool,
) -> None:
    [held] = database.execute(
        "SELECT COUNT(*) FROM conversation_items WHERE conversation_id = ?", (conversation_id,)
    ).fetchone()
    if held + len(items) > MAX_ITEMS:
        raise BadRequest(
            f"The conversation would have {held + len(items)} items; at most {MAX_ITEMS} are allowed. Start a new one.",
            param="conversation",
        )
    database.executemany(
        "INSERT INTO conversation_items (conversation_id, id, generated, item) VALUES (?, ?, ?, ?)",
        [(conversation_id, item.id, generated, data) for item, data in zip(items, encoded, strict=True)],
    )


def messages(database: sqlite3.Connection, conversation_id: str, owner: str) -> list[Message]:
    get(database, conversation_id, owner, "conversation")
    rows = database.execute(
        "SELECT generated, item FROM conversation_items WHERE conversation_id = ? ORDER BY number", (conversation_id,)
    )
    items: list[InputItem | OutputItem] = [
        _output.decode(row["item"]) if row["generated"] else _input.decode(row["item"]) for row in rows.fetchall()
    ]
    return messages_of(items)


def list_items(database: sqlite3.Connection, conversation_id: str, owner: str, page: Page) -> InputItemList:
    get(database, conversation_id, owner)
    order, beyond = ("DESC", "<") if page.newest_first else ("ASC", ">")
    bound, values = "", [conversation_id]
    if page.after is not None:
        bound = f" AND number {beyond} ?"
        values.append(_row(database, conversation_id, page.after, "after")["number"])
    rows = database.execute(
        f"SELECT id, item FROM conversation_items WHERE conversation_id = ?{bound} ORDER BY number {order} LIMIT ?",
        (*values, page.limit + 1),
    ).fetchall()
    shown = [bytes(row["item"]) for row in rows[: page.limit]]
    ids = [row["id"] for row in rows[: page.limit]]
    first, last = (ids[0], ids[-1]) if ids else ("", "")
    return InputItemList("list", [msgspec.Raw(data) for data in shown], first, last, len(rows) > page.limit)


def get_item(database: sqlite3.Connection, conversation_id: str, owner: str, item_id: str) -> bytes:
    get(database, conversation_id, owner)
    return bytes(_row(database, conversation_id, item_id, "item_id")["item"])


def delete_item(database: sqlite3.Connection, conversation_id: str, owner: str, item_id: str) -> ConversationAnswer:
    _row(database, get(database, conversation_id, owner).id, item_id, "item_id")
    database.execute("DELETE FROM conversation_items WHERE conversation_id = ? AND id = ?", (conversation_id, item_id))
    return get(database, conversation_id, owner)


def _row(database: sqlite3.Connection, conversation_id: str, item_id: str, param: str) -> sqlite3.Row:
    row: sqlite3.Row | None = database.execute(
        "SELECT * FROM conversation_items WHERE conversation_id = ? AND id = ?", (conversation_id, item_id)
    ).fetchone()
    if row is None:
        raise NotFound(f"The conversation has no item {item_id[:200]!r}.", param=param)
    return row
