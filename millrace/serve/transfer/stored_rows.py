"""/v1/stored: what a request refers to (a session, stored responses, a conversation), for gateways that continue its
stream on another replica. Rows of the database travel as they are; the owner is whoever the request names there."""

from __future__ import annotations

import re
import sqlite3
import time
from typing import Any

import msgspec
from aiohttp import web

from millrace.errors import BadRequest, Conflict, Forbidden, NotFound
from millrace.serve.http.app_keys import REQUEST_ID
from millrace.serve.http.body import read_any_body
from millrace.serve.http.ids import REQUEST_ID_HEADER
from millrace.serve.http.json_answer import json_answer
from millrace.serve.http.queries import check_query
from millrace.serve.sessions.store import Session
from millrace.serve.state import STATE
from millrace.serve.tenancy.owner import owner_of
from millrace.serve.tenancy.trust import is_gateway

Value = str | bytes | int | float | None
Rows = list[dict[str, Any]]
"""Their values are `Value`."""
_COLUMNS = {
    "sessions": ("id", "expires_at", "body"),
    "responses": ("id", "created_at", "previous_id", "status", "background", "body", "input", "output", "request"),
    "response_items": ("id", "response_id"),
    "conversations": ("id", "created_at", "metadata"),
    "conversation_items": ("conversation_id", "id", "generated", "item"),
}
"""Of each table, without numbers and owners, which every server gives anew."""
_AT = re.compile(r"(sessions|responses|conversations)/([^/]{1,256})")
_MAX_CHAIN = 1000
"""Responses before one that is continued; longer chains are refused when they are used."""
_session = msgspec.msgpack.Decoder(Session)


class StoredRows(msgspec.Struct):
    names: list[str]
    """`ROOM/ID` of everything in it, first what was asked for."""
    tables: dict[str, Rows]


_rows = msgspec.msgpack.Decoder(StoredRows)


async def give(request: web.Request) -> web.Response:
    _check_trust(request)
    check_query(request, ("at",))
    found = _AT.fullmatch(request.query.get("at", ""))
    if found is None:
        raise BadRequest("at must be sessions/ID, responses/ID or conversations/ID.", param="at")
    state = request.app[STATE]
    rows = await state.store.run(_GIVERS[found[1]], found[2], owner_of(request))
    headers = {REQUEST_ID_HEADER: request[REQUEST_ID], "Server": "millrace"}
    return web.Response(body=msgspec.msgpack.encode(rows), content_type="application/octet-stream", headers=headers)


async def take(request: web.Request) -> web.Response:
    _check_trust(request)
    check_query(request, ())
    state = request.app[STATE]
    try:
        rows = _rows.decode(await read_any_body(request, state.body_limit_bytes))
    except msgspec.DecodeError as error:
        raise BadRequest(f"The body is not what GET /v1/stored answers: {error}.") from None
    for table, entries in rows.tables.items():
        if not all(tuple(one) == _COLUMNS.get(table) and all(map(_is_value, one.values())) for one in entries):
            raise BadRequest(f"The table {table[:80]!r} is not one of this server's; it needs the same release.")
    await state.store.run(put_rows, rows, owner_of(request))
    return json_answer(request, {"object": "stored", "names": rows.names})


def _is_value(given: Any) -> bool:
    return given is None or isinstance(given, (str, bytes, int, float))


def _check_trust(request: web.Request) -> None:
    state = request.app[STATE]
    server = state.config.server
    if not is_gateway(request, server.host, server.gateway_key, has_keys=state.keyring is not None):
        raise Forbidden("Only a gateway moves what is stored; use an operator's key or --gateway-key.")


# ── giving ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _session_rows(database: sqlite3.Connection, name: str, owner: str) -> StoredRows:
    where = "id = ? AND owner = ? AND expires_at > ?"
    rows = _selected(database, "sessions", where, name, owner, time.time())
    return StoredRows([f"sessions/{_known(rows, name)}"], {"sessions": rows})


def _response_rows(database: sqlite3.Connection, name: str, owner: str) -> StoredRows:
    """A response and those before it."""
    found: Rows = []
    items: Rows = []
    wanted: Value = name
    while wanted is not None and len(found) <= _MAX_CHAIN:
        rows = _selected(database, "responses", "id = ? AND owner = ?", wanted, owner)
        _known(rows, str(wanted))
        found += rows
        items += _selected(database, "response_items", "response_id = ?", wanted)
        wanted = rows[0]["previous_id"]
    return StoredRows([f"responses/{one['id']}" for one in found], {"responses": found, "response_items": items})


def _conversation_rows(database: sqlite3.Connection, name: str, owner: str) -> StoredRows:
    rows = _selected(database, "conversations", "id = ? AND owner = ?", name, owner)
    known = _known(rows, name)
    items = _selected(database, "conversation_items", "conversation_id = ? ORDER BY number", name)
    return StoredRows([f"conversations/{known}"], {"conversations": rows, "conversation_items": items})


_GIVERS = {"sessions": _session_rows, "responses": _response_rows, "conversations": _conversation_rows}


def _selected(database: sqlite3.Connection, table: str, where: str, *values: Value) -> Rows:
    columns = _COLUMNS[table]
    rows = database.execute(f"SELECT {', '.join(columns)} FROM {table} WHERE {where}", values).fetchall()
    return [dict(zip(columns, row, strict=True)) for row in rows]


def _known(rows: Rows, name: str) -> str:
    if not rows:
        raise NotFound(f"There is nothing stored here under {name[:200]!r}.", param="at")
    return name


# ── taking ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def put_rows(database: sqlite3.Connection, rows: StoredRows, owner: str) -> None:
    """What is here already and is newer stays, and the gateway is told."""
    for session in rows.tables.get("sessions", []):
        _check_not_newer(database, session, owner)
    for conversation in rows.tables.get("conversations", []):
        count = "SELECT COUNT(*) FROM conversation_items WHERE conversation_id = ?"
        [held] = database.execute(count, (conversation["id"],)).fetchone()
        if held > len(rows.tables.get("conversation_items", [])):
            raise Conflict(f"The conversation {conversation['id']!r} has gone on here meanwhile.")
        database.execute("DELETE FROM conversation_items WHERE conversation_id = ?", (conversation["id"],))
    for table, entries in rows.tables.items():
        has_owner = table in _GIVERS
        columns = (*_COLUMNS[table], *(("owner",) if has_owner else ()))
        marks = ", ".join("?" * len(columns))
        for entry in entries:
            if has_owner:
                _check_owner(database, table, entry, owner)
            values = (*entry.values(), *((owner,) if has_owner else ()))
            database.execute(f"INSERT OR REPLACE INTO {table} ({', '.join(columns)}) VALUES ({marks})", values)


def _check_not_newer(database: sqlite3.Connection, entry: dict[str, Any], owner: str) -> None:
    held = database.execute("SELECT body FROM sessions WHERE id = ? AND owner = ?", (entry["id"], owner)).fetchone()
    if not isinstance(entry["body"], bytes):
        raise BadRequest("A session's body is not bytes.")
    if held is not None and _session.decode(held["body"]).turns > _session.decode(entry["body"]).turns:
        raise Conflict(f"The session {entry['id']!r} has gone on here meanwhile.")


def _check_owner(database: sqlite3.Connection, table: str, entry: dict[str, Any], owner: str) -> None:
    """Names of sessions are each tenant's own, the other ids are everybody's."""
    if table != "sessions":
        held = database.execute(f"SELECT owner FROM {table} WHERE id = ?", (entry["id"],)).fetchone()
        if held is not None and held["owner"] != owner:
            raise Conflict(f"{entry['id']!r} belongs to another tenant here.")
