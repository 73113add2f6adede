"""Items of stored responses that an input names by id (`item_reference`), put in the place of their references."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
from msgspec import Raw

from millrace.errors import BadRequest, NotFound
from millrace.serve.http.body import BodyDecoder
from millrace.serve.responses.schemas_items import OutputItem, ResponseItemReference
from millrace.serve.state import FrontState

KIND = "item_reference"
_reference = BodyDecoder(ResponseItemReference)


class _Typed(msgspec.Struct):
    type: str | None = None


class _Stored(msgspec.Struct):
    id: str


async def with_items(state: FrontState, raw: Raw, owner: str) -> Raw:
    """The input with the items that it names. Anything wrong elsewhere in it is left as it is."""
    if KIND.encode() not in bytes(raw):
        return raw
    try:
        given = msgspec.json.decode(raw, type=list[Raw])
    except msgspec.ValidationError:
        return raw
    wanted = [_id_of(bytes(one), f"input[{index}]") for index, one in enumerate(given)]
    found = await state.store.run(_stored, [item_id for item_id in wanted if item_id is not None], owner)
    items = [one if item_id is None else found[item_id] for one, item_id in zip(given, wanted, strict=True)]
    return Raw(msgspec.json.encode(items))


def _id_of(data: bytes, at: str) -> str | None:
    """The id that an item refers to; None if it is no reference."""
    try:
        item = msgspec.json.decode(data, type=_Typed)
    except msgspec.ValidationError:
        return None
    if item.type != KIND:
        return None
    with errors_at(at):
        return _reference.decode(data).id


@contextmanager
def errors_at(at: str) -> Iterator[None]:
    """Errors of decoding an item name its place."""
    try:
        yield
    except BadRequest as error:
        field = f"{at}.{error.param}" if error.param else at
        text = error.message.replace(f"'{error.param}'", f"'{field}'")
        raise BadRequest(text, param=field, code=error.code) from None


def _stored(database: sqlite3.Connection, ids: Sequence[str], owner: str) -> dict[str, Raw]:
    found: dict[str, Raw] = {}
    for item_id in ids:
        row = database.execute(
            "SELECT output FROM responses WHERE owner = ?"
            " AND id = (SELECT response_id FROM response_items WHERE id = ?)",
            (owner, item_id),
        ).fetchone()
        items = [] if row is None else msgspec.json.decode(row["output"], type=list[Raw])
        match = next((one for one in items if msgspec.json.decode(one, type=_Stored).id == item_id), None)
        if match is None:
            raise NotFound(
                f"There is no stored item {item_id[:200]!r}: its response was deleted, not stored, or never created."
                " Send the item itself.",
                param="input",
            )
        found[item_id] = match
    return found


def keep_ids(database: sqlite3.Connection, response_id: str, items: Sequence[OutputItem]) -> None:
    """Remember whose items these are. A response that is stored again replaces what it had."""
    forget_ids(database, response_id)
    database.executemany(
        "INSERT OR REPLACE INTO response_items (id, response_id) VALUES (?, ?)",
        [(item.id, response_id) for item in items],
    )


def forget_ids(database: sqlite3.Connection, response_id: str) -> None:
    database.execute("DELETE FROM response_items WHERE response_id = ?", (response_id,))
