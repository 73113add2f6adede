"""Stored files: a database row each, and the bytes in a file named by the id."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from millrace.errors import BadRequest, NotFound
from millrace.serve.database import Store
from millrace.serve.http.ids import new_id
from millrace.serve.http.queries import Page


class FileAnswer(msgspec.Struct):
    """A stored file."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    expires_at: int | UnsetType = UNSET


class FileList(msgspec.Struct):
    object: Literal["list"]
    data: list[FileAnswer]
    first_id: str
    last_id: str
    """Both are empty if the list is."""
    has_more: bool


class FileDeleted(msgspec.Struct):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


def new_file_id() -> str:
    return new_id("file-")


def path_of(store: Store, file_id: str) -> Path:
    """Call only with ids that have a row: we made those, and they contain no path separator."""
    return store.files / file_id


def add_file(
    database: sqlite3.Connection, file_id: str, owner: str, filename: str, purpose: str, size: int, lives_s: int | None
) -> FileAnswer:
    now = int(time.time())
    expires_at = None if lives_s is None else now + lives_s
    database.execute(
        "INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?, ?)",
        (file_id, owner, filename, purpose, size, now, expires_at),
    )
    return FileAnswer(
        file_id, "file", size, now, filename, purpose, expires_at=UNSET if expires_at is None else expires_at
    )


def _answer(row: sqlite3.Row) -> FileAnswer:
    expires_at = row["expires_at"]
    return FileAnswer(
        row["id"],
        "file",
        row["bytes"],
        row["created_at"],
        row["filename"],
        row["purpose"],
        expires_at=UNSET if expires_at is None else expires_at,
    )


_ALIVE = "owner = ? AND (expires_at IS NULL OR expires_at > ?)"


def get_file(database: sqlite3.Connection, file_id: str, owner: str, param: str = "file_id") -> FileAnswer:
    row = database.execute(
        f"SELECT * FROM files WHERE id = ? AND {_ALIVE}", (file_id, owner, int(time.time()))
    ).fetchone()
    if row is None:
        raise NotFound(f"There is no file {file_id[:200]!r}; GET /v1/files lists all.", param=param)
    return _answer(row)


def list_files(database: sqlite3.Connection, owner: str, page: Page, purpose: str | None) -> FileList:
    rows = database.execute(
        f"SELECT * FROM files WHERE {_ALIVE} AND (? IS NULL OR purpose = ?) ORDER BY created_at, id",
        (owner, int(time.time()), purpose, purpose),
    ).fetchall()
    if page.newest_first:
        rows.reverse()
    if page.after is not None:
        ids = [row["id"] for row in rows]
        if page.after not in ids:
            raise BadRequest(f"after is {page.after[:200]!r}, which is not in this list.", param="after")
        rows = rows[ids.index(page.after) + 1 :]
    shown = [_answer(row) for row in rows[: page.limit]]
    first, last = (shown[0].id, shown[-1].id) if shown else ("", "")
    return FileList("list", shown, first, last, len(rows) > len(shown))


def delete_file(database: sqlite3.Connection, store: Store, file_id: str, owner: str) -> FileDeleted:
    get_file(database, file_id, owner)
    database.execute("DELETE FROM files WHERE id = ?", (file_id,))
    path_of(store, file_id).unlink(missing_ok=True)
    return FileDeleted(file_id, "file", True)
