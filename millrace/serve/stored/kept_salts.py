"""The salt that a gateway sent with stored work, for the time when no request carries it any more."""

from __future__ import annotations

import sqlite3

from aiohttp import web

from millrace.serve.tenancy.cache_scope import SALT_HEADER, salted


def salt_in(request: web.Request) -> str:
    """Checked, so that it does not fail later."""
    given = request.headers.get(SALT_HEADER, "")
    salted(given, "")
    return given


def keep_salt(database: sqlite3.Connection, stored_id: str, salt: str) -> None:
    if salt:
        database.execute("INSERT OR REPLACE INTO cache_salts (id, salt) VALUES (?, ?)", (stored_id, salt))


def kept_salt(database: sqlite3.Connection, stored_id: str) -> str:
    row = database.execute("SELECT salt FROM cache_salts WHERE id = ?", (stored_id,)).fetchone()
    return "" if row is None else str(row["salt"])


def forget_salt(database: sqlite3.Connection, stored_id: str) -> None:
    database.execute("DELETE FROM cache_salts WHERE id = ?", (stored_id,))
