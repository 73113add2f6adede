"""The embedded store: one SQLite file for the gateways of one machine.

Times are of the machine's monotonic clock, which all its processes share: a step of the wall clock neither refills a
budget nor holds a tenant back. Changes that are asked for while one is written are written together, in their order:
a transaction costs more than the changes in it.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from millrace.gateway.limits.store import HOUR_S, LEASE_S, WINDOW_S, Demand, StoreLost, Verdict, boot_id, verdict

_T = TypeVar("_T")
Work = Callable[[sqlite3.Connection, float], Any]
"""A change, given the time."""
BUSY_S = 1.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS machine (boot TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS gateways (id TEXT PRIMARY KEY, seen REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS open (
    tenant TEXT NOT NULL, gateway TEXT NOT NULL, count INTEGER NOT NULL, PRIMARY KEY (tenant, gateway)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS spent (
    tenant TEXT NOT NULL, second INTEGER NOT NULL, tokens INTEGER NOT NULL, PRIMARY KEY (tenant, second)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS owed (tenant TEXT PRIMARY KEY, amount REAL NOT NULL, at REAL NOT NULL) WITHOUT ROWID;
"""


class SqliteStore:
    def __init__(self, path: Path, gateway: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._gateway = gateway
        self._clock = clock
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="limits")
        self._connection: sqlite3.Connection | None = None
        self._waiting: list[tuple[Work, asyncio.Future[Any]]] = []
        self._writer: asyncio.Task[None] | None = None

    async def reserve(self, demand: Demand) -> Verdict:
        return await self._run(lambda database, now: self._reserve(database, now, demand))

    async def release(self, tenant: str, second: int, refund: int) -> None:
        def work(database: sqlite3.Connection, now: float) -> None:
            database.execute(
                "UPDATE open SET count = max(0, count - 1) WHERE tenant = ? AND gateway = ?", (tenant, self._gateway)
            )
            database.execute(
                "UPDATE spent SET tokens = max(0, tokens - ?) WHERE tenant = ? AND second = ?", (refund, tenant, second)
            )

        await self._run(work)

    async def owed(self, tenant: str, per_hour: float) -> float:
        return await self._run(lambda database, now: _owed(database, tenant, per_hour, now))

    async def spend(self, tenant: str, amount: float, per_hour: float) -> None:
        def work(database: sqlite3.Connection, now: float) -> None:
            total = _owed(database, tenant, per_hour, now) + amount
            database.execute("INSERT OR REPLACE INTO owed VALUES (?, ?, ?)", (tenant, total, now))

        await self._run(work)

    async def beat(self) -> None:
        await self._run(self._beat)

    async def close(self) -> None:
        def end() -> None:
            if self._connection is not None:
                self._connection.close()

        if self._writer is not None:
            await self._writer
        await asyncio.get_running_loop().run_in_executor(self._thread, end)
        self._thread.shutdown(wait=False)

    # ── in the thread ─────────────────────────────────────────────────────────────────────────────────────────────────
    def _reserve(self, database: sqlite3.Connection, now: float, demand: Demand) -> Verdict:
        second, tenant = int(now), demand.tenant
        (num_open,) = database.execute(
            "SELECT coalesce(sum(count), 0) FROM open JOIN gateways ON gateways.id = open.gateway"
            " WHERE tenant = ? AND (seen > ? OR gateway = ?)",
            (tenant, now - LEASE_S, self._gateway),
        ).fetchone()
        slots = database.execute(
            "SELECT second, tokens FROM spent WHERE tenant = ? AND second > ? ORDER BY second",
            (tenant, second - WINDOW_S),
        ).fetchall()
        found = verdict(demand, num_open, slots, second)
        if found.is_admitted:
            database.execute(
                "INSERT INTO open VALUES (?, ?, 1) ON CONFLICT DO UPDATE SET count = count + 1",
                (tenant, self._gateway),
            )
            database.execute(
                "INSERT INTO spent VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET tokens = tokens + excluded.tokens",
                (tenant, second, demand.tokens),
            )
        return found

    def _beat(self, database: sqlite3.Connection, now: float) -> None:
        database.execute("INSERT OR REPLACE INTO gateways VALUES (?, ?)", (self._gateway, now))
        database.execute("DELETE FROM gateways WHERE seen < ?", (now - HOUR_S,))
        database.execute("DELETE FROM open WHERE gateway NOT IN (SELECT id FROM gateways)")
        database.execute("DELETE FROM spent WHERE second <= ?", (int(now) - WINDOW_S,))

    async def _run(self, work: Callable[[sqlite3.Connection, float], _T]) -> _T:
        """A caller that is cancelled leaves its change in the queue."""
        done: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self._waiting.append((work, done))
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write())
        return await done

    async def _write(self) -> None:
        """All that waits, and what comes meanwhile. A transaction that fails fails each of its changes."""
        loop = asyncio.get_running_loop()
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                results = await loop.run_in_executor(self._thread, self._transaction, [work for work, _ in batch])
            except Exception as error:
                is_lost = isinstance(error, (sqlite3.Error, OSError))
                for _, done in batch:
                    if not done.cancelled():
                        done.set_exception(StoreLost(f"{self._path}: {error}") if is_lost else error)
            else:
                for (_, done), result in zip(batch, results, strict=True):
                    if not done.cancelled():
                        done.set_result(result)

    def _transaction(self, batch: list[Work]) -> list[Any]:
        database = self._connection or self._open()
        database.execute("BEGIN IMMEDIATE")
        try:
            now = self._clock()
            result = [work(database, now) for work in batch]
            database.execute("COMMIT")
        except BaseException:
            if database.in_transaction:
                database.execute("ROLLBACK")
            raise
        return result

    def _open(self) -> sqlite3.Connection:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        database = sqlite3.connect(self._path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = OFF")  # A crash of the machine starts the clock anew in any case.
            database.executescript(_SCHEMA)
            database.execute("BEGIN IMMEDIATE")
            if database.execute("SELECT boot FROM machine").fetchone() != (boot_id(),):
                _start_anew(database, self._clock())
            self._beat(database, self._clock())
            database.execute("COMMIT")
        except BaseException:
            database.close()
            raise
        self._connection = database
        return database


def _start_anew(database: sqlite3.Connection, now: float) -> None:
    """The machine was started: open requests and the last minute are gone, debts stand as they were."""
    for table in ("machine", "gateways", "open", "spent"):
        database.execute(f"DELETE FROM {table}")
    database.execute("UPDATE owed SET at = ?", (now,))
    database.execute("INSERT INTO machine VALUES (?)", (boot_id(),))


def _owed(database: sqlite3.Connection, tenant: str, per_hour: float, now: float) -> float:
    row = database.execute("SELECT amount, at FROM owed WHERE tenant = ?", (tenant,)).fetchone()
    if row is None:
        return 0.0
    amount, at = row
    refilled: float = per_hour * max(0.0, now - at) / HOUR_S
    return max(0.0, float(amount) - refilled)
