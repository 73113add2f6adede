"""What outlives a request: SQLite and plain files in one data directory.

Every call runs in the store's own thread, one transaction each, so no disk is waited for on the event loop. Several
fronts, and a server after its restart, may have the directory open at once; SQLite's write-ahead log keeps them apart.
Nothing is created before somebody asks.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from millrace.errors import MillraceError
from millrace.serve.data_directory import DATABASE

_T = TypeVar("_T")
_P = ParamSpec("_P")

BUSY_S = 10.0
"""How long one process waits for another's transaction."""
RESPONSE_DAYS = 30
"""Stored responses older than this are removed, as OpenAI does it."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, filename TEXT NOT NULL, purpose TEXT NOT NULL,
    bytes INTEGER NOT NULL, created_at INTEGER NOT NULL, expires_at INTEGER
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL, endpoint TEXT NOT NULL,
    input_file_id TEXT NOT NULL, completion_window TEXT NOT NULL, metadata TEXT, status TEXT NOT NULL, outcome TEXT,
    errors TEXT, model TEXT, output_file_id TEXT, error_file_id TEXT, output_lives_s INTEGER,
    created_at INTEGER NOT NULL, expires_at INTEGER NOT NULL, in_progress_at INTEGER, finalizing_at INTEGER,
    completed_at INTEGER, failed_at INTEGER, expired_at INTEGER, cancelling_at INTEGER, cancelled_at INTEGER,
    total INTEGER NOT NULL DEFAULT 0, completed INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0,
    prompt_tokens INTEGER NOT NULL DEFAULT 0, cached_tokens INTEGER NOT NULL DEFAULT 0,
    output_tokens INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS batch_lines (
    batch_id TEXT NOT NULL, line_no INTEGER NOT NULL, custom_id TEXT NOT NULL, offset INTEGER NOT NULL,
    length INTEGER NOT NULL, status INTEGER NOT NULL DEFAULT 0, result BLOB,
    PRIMARY KEY (batch_id, line_no)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL,
    created_at INTEGER NOT NULL, previous_id TEXT, status TEXT NOT NULL, background INTEGER NOT NULL,
    body BLOB NOT NULL, input BLOB NOT NULL, output BLOB, request BLOB
);
CREATE TABLE IF NOT EXISTS conversations (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, created_at INTEGER NOT NULL, metadata BLOB NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS conversation_items (
    number INTEGER PRIMARY KEY AUTOINCREMENT, conversation_id TEXT NOT NULL, id TEXT NOT NULL,
    generated INTEGER NOT NULL, item BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS items_of_conversations ON conversation_items (conversation_id, number);
CREATE TABLE IF NOT EXISTS response_events (
    response_id TEXT NOT NULL, number INTEGER NOT NULL, frames BLOB NOT NULL, PRIMARY KEY (response_id, number)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS response_items (id TEXT PRIMARY KEY, response_id TEXT NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS items_of_responses ON response_items (response_id);
CREATE TABLE IF NOT EXISTS chat_completions (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL,
    created_at INTEGER NOT NULL, metadata BLOB NOT NULL, messages BLOB NOT NULL, body BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS sessions (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL, owner TEXT NOT NULL,
    expires_at REAL NOT NULL, body BLOB NOT NULL, UNIQUE (owner, id)
);
CREATE TABLE IF NOT EXISTS cache_salts (id TEXT PRIMARY KEY, salt TEXT NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS open_batches ON batches (status);
CREATE INDEX IF NOT EXISTS open_responses ON responses (status) WHERE background = 1;
"""


class StoreFailed(MillraceError):
    """The disk is full, the directory cannot be written, or another process held the database for too long."""

    status = 500
    code = "store_failed"


class Store:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.files = directory / "files"
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")
        self._connection: sqlite3.Connection | None = None

    @property
    def is_in_use(self) -> bool:
        """Whether anything was ever stored here, by whomever."""
        return self._connection is not None or (self.directory / DATABASE).exists()

    async def run(
        self, work: Callable[Concatenate[sqlite3.Connection, _P], _T], *args: _P.args, **more: _P.kwargs
    ) -> _T:
        """Run `work` in one transaction: all of it happens, or, if it raises, none."""
        return await self.in_thread(lambda: self._transaction(lambda database: work(database, *args, **more)))

    async def in_thread(self, work: Callable[[], _T]) -> _T:
        """Run what touches files in the store's thread, in order with its transactions."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except (sqlite3.Error, OSError) as error:
            raise StoreFailed(
                f"The data directory {self.directory} could not be used: {error}. Check its disk and its permissions,"
                " or start the server with another --data-dir."
            ) from error

    def forget_expired(self, connection: sqlite3.Connection) -> None:
        """For `run`: remove responses and files whose time has come."""
        now = int(time.time())
        for table in ("responses", "chat_completions"):
            connection.execute(f"DELETE FROM {table} WHERE created_at < ?", (now - RESPONSE_DAYS * 86400,))
        for table in ("response_events", "response_items"):
            connection.execute(f"DELETE FROM {table} WHERE response_id NOT IN (SELECT id FROM responses)")
        connection.execute("DELETE FROM sessions WHERE expires_at <= ?", (now,))
        connection.execute(
            "DELETE FROM cache_salts WHERE id NOT IN (SELECT id FROM responses UNION SELECT id FROM batches)"
        )
        for row in connection.execute("SELECT id FROM files WHERE expires_at <= ?", (now,)).fetchall():
            (self.files / row["id"]).unlink(missing_ok=True)
            connection.execute("DELETE FROM files WHERE id = ?", (row["id"],))

    def close(self) -> None:
        self._thread.submit(self._close)
        self._thread.shutdown(wait=True)

    # ── in the thread ─────────────────────────────────────────────────────────────────────────────────────────────────
    def _transaction(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        connection = self._open()
        connection.execute("BEGIN IMMEDIATE")
        try:
            result = work(connection)
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")
        return result

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            self.files.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(
                self.directory / DATABASE, timeout=BUSY_S, isolation_level=None, check_same_thread=False
            )
            connection.row_factory = sqlite3.Row
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.executescript(_SCHEMA)
            self._connection = connection
        return self._connection

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
