"""Batches in the database. Every function runs inside one transaction.

A line's result and the batch's counts are written in one transaction, and only while the line is pending: each line has
exactly one result, even if the server is killed.
"""

from __future__ import annotations

import sqlite3
import time
from dataclasses import dataclass
from typing import Any, Literal, cast

import msgspec
from msgspec import UNSET, UnsetType

from millrace.errors import BadRequest, Conflict, NotFound
from millrace.serve.http.ids import new_id
from millrace.serve.http.queries import Page
from millrace.serve.stored.kept_salts import forget_salt, kept_salt

BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
OPEN = ("validating", "in_progress", "finalizing", "cancelling")
WINDOW_S = 86_400
PENDING, SUCCEEDED, FAILED = 0, 1, 2
"""State of a line. Results of succeeded lines go to the output file, of failed ones to the error file."""


# ── answers ───────────────────────────────────────────────────────────────────────────────────────────────────────────
class BatchError(msgspec.Struct):
    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchErrors(msgspec.Struct):
    object: Literal["list"]
    data: list[BatchError]


class RequestCounts(msgspec.Struct):
    total: int
    completed: int
    failed: int


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class BatchUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class BatchAnswer(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A batch: its status and its result files. Times of states that it has not reached are left out."""

    id: str
    object: Literal["batch"]
    endpoint: str
    model: str
    errors: BatchErrors | UnsetType = UNSET
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | UnsetType = UNSET
    error_file_id: str | UnsetType = UNSET
    created_at: int
    in_progress_at: int | UnsetType = UNSET
    expires_at: int
    finalizing_at: int | UnsetType = UNSET
    completed_at: int | UnsetType = UNSET
    failed_at: int | UnsetType = UNSET
    expired_at: int | UnsetType = UNSET
    cancelling_at: int | UnsetType = UNSET
    cancelled_at: int | UnsetType = UNSET
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, str] | None


class BatchList(msgspec.Struct):
    object: Literal["list"]
    data: list[BatchAnswer]
    has_more: bool
    first_id: str | UnsetType = UNSET
    last_id: str | UnsetType = UNSET


_OPTIONAL = (
    *("in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at"),
    *("output_file_id", "error_file_id"),
)


def _answer(row: sqlite3.Row) -> BatchAnswer:
    details = InputTokensDetails(row["cached_tokens"]), OutputTokensDetails(0)
    total = row["prompt_tokens"] + row["output_tokens"]
    return BatchAnswer(
        id=row["id"],
        object="batch",
        endpoint=row["endpoint"],
        model=row["model"],
        errors=UNSET if row["errors"] is None else msgspec.json.decode(row["errors"], type=BatchErrors),
        input_file_id=row["input_file_id"],
        completion_window=row["completion_window"],
        status=row["status"],
        created_at=row["created_at"],
        expires_at=row["expires_at"],
        request_counts=RequestCounts(row["total"], row["completed"], row["failed"]),
        usage=BatchUsage(row["prompt_tokens"], details[0], row["output_tokens"], details[1], total),
        metadata=None if row["metadata"] is None else msgspec.json.decode(row["metadata"]),
        **{name: row[name] for name in _OPTIONAL if row[name] is not None},
    )


# ── operations of clients ─────────────────────────────────────────────────────────────────────────────────────────────
def add_batch(
    database: sqlite3.Connection,
    owner: str,
    endpoint: str,
    input_file_id: str,
    metadata: dict[str, str] | None,
    output_lives_s: int | None,
    model: str,
) -> BatchAnswer:
    now, batch_id = int(time.time()), new_id("batch_")
    database.execute(
        "INSERT INTO batches (id, owner, endpoint, input_file_id, completion_window, metadata, status, created_at,"
        " expires_at, output_lives_s, model) VALUES (?, ?, ?, ?, '24h', ?, 'validating', ?, ?, ?, ?)",
        (
            *(batch_id, owner, endpoint, input_file_id),
            *(None if metadata is None else msgspec.json.encode(metadata).decode(), now, now + WINDOW_S),
            *(output_lives_s, model),
        ),
    )
    return get_batch(database, batch_id, owner)


def _row(database: sqlite3.Connection, batch_id: str, owner: str) -> sqlite3.Row:
    row = database.execute("SELECT * FROM batches WHERE id = ? AND owner = ?", (batch_id, owner)).fetchone()
    if row is None:
        raise NotFound(f"There is no batch {batch_id[:200]!r}; GET /v1/batches lists all.", param="batch_id")
    return cast(sqlite3.Row, row)


def get_batch(database: sqlite3.Connection, batch_id: str, owner: str) -> BatchAnswer:
    return _answer(_row(database, batch_id, owner))


def list_batches(database: sqlite3.Connection, owner: str, page: Page) -> BatchList:
    before = 1 << 62
    if page.after is not None:
        row = database.execute("SELECT number FROM batches WHERE id = ? AND owner = ?", (page.after, owner)).fetchone()
        if row is None:
            raise BadRequest(f"after is {page.after[:200]!r}, which is not in this list.", param="after")
        before = row["number"]
    rows = database.execute(
        "SELECT * FROM batches WHERE owner = ? AND number < ? ORDER BY number DESC LIMIT ?",
        (owner, before, page.limit + 1),
    ).fetchall()
    shown = [_answer(row) for row in rows[: page.limit]]
    first, last = (shown[0].id, shown[-1].id) if shown else (UNSET, UNSET)
    return BatchList("list", shown, len(rows) > len(shown), first, last)


def cancel_batch(database: sqlite3.Connection, batch_id: str, owner: str) -> BatchAnswer:
    batch = get_batch(database, batch_id, owner)
    if batch.status in ("cancelling", "cancelled"):
        return batch
    if batch.status not in ("validating", "in_progress"):
        raise Conflict(f"The batch {batch_id!r} is {batch.status}; only a running batch can be cancelled.")
    database.execute(
        "UPDATE batches SET status = 'cancelling', cancelling_at = ? WHERE id = ?", (int(time.time()), batch_id)
    )
    return get_batch(database, batch_id, owner)


# ── progress of a run ─────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True)
class OpenBatch:
    id: str
    owner: str
    status: str
    outcome: str | None
    """Status that a batch in `finalizing` will get."""
    endpoint: str
    input_file_id: str
    expires_at: int
    output_lives_s: int | None
    salt: str
    """That a gateway sent with it."""


@dataclass(frozen=True, slots=True)
class Line:
    """Position of a request in the input file, in bytes."""

    line_no: int
    custom_id: str
    offset: int
    length: int


def open_batches(database: sqlite3.Connection) -> list[OpenBatch]:
    marks = ", ".join("?" * len(OPEN))
    rows = database.execute(f"SELECT * FROM batches WHERE status IN ({marks}) ORDER BY number", OPEN).fetchall()
    return [
        OpenBatch(
            row["id"],
            row["owner"],
            row["status"],
            row["outcome"],
            row["endpoint"],
            row["input_file_id"],
            row["expires_at"],
            row["output_lives_s"],
            kept_salt(database, row["id"]),
        )
        for row in rows
    ]


def fail_validation(database: sqlite3.Connection, batch_id: str, errors: list[BatchError]) -> None:
    database.execute(
        "UPDATE batches SET status = 'failed', failed_at = ?, errors = ? WHERE id = ?",
        (int(time.time()), msgspec.json.encode(BatchErrors("list", errors)).decode(), batch_id),
    )


def begin(database: sqlite3.Connection, batch_id: str, lines: list[Line]) -> None:
    """Store the validated lines and start the batch. Idempotent: a restart may repeat it."""
    database.executemany(
        "INSERT OR IGNORE INTO batch_lines (batch_id, line_no, custom_id, offset, length) VALUES (?, ?, ?, ?, ?)",
        [(batch_id, line.line_no, line.custom_id, line.offset, line.length) for line in lines],
    )
    database.execute(
        "UPDATE batches SET total = ?, in_progress_at = ? WHERE id = ?", (len(lines), int(time.time()), batch_id)
    )
    database.execute("UPDATE batches SET status = 'in_progress' WHERE id = ? AND status = 'validating'", (batch_id,))


def pending_lines(database: sqlite3.Connection, batch_id: str) -> list[Line]:
    rows = database.execute(
        "SELECT line_no, custom_id, offset, length FROM batch_lines WHERE batch_id = ? AND status = ? ORDER BY line_no",
        (batch_id, PENDING),
    ).fetchall()
    return [Line(*row) for row in rows]


def record(
    database: sqlite3.Connection,
    batch_id: str,
    line_no: int,
    status: int,
    result: bytes,
    tokens: tuple[int, int, int] = (0, 0, 0),
) -> None:
    """Write the result of a pending line. `tokens`: prompt, cached, output."""
    done = database.execute(
        "UPDATE batch_lines SET status = ?, result = ? WHERE batch_id = ? AND line_no = ? AND status = ?",
        (status, result, batch_id, line_no, PENDING),
    )
    if done.rowcount:
        column = "completed" if status == SUCCEEDED else "failed"
        database.execute(
            f"UPDATE batches SET {column} = {column} + 1, prompt_tokens = prompt_tokens + ?,"
            " cached_tokens = cached_tokens + ?, output_tokens = output_tokens + ? WHERE id = ?",
            (*tokens, batch_id),
        )


def finalize(database: sqlite3.Connection, batch_id: str, outcome: str) -> None:
    database.execute(
        "UPDATE batches SET status = 'finalizing', outcome = ?, finalizing_at = ? WHERE id = ?",
        (outcome, int(time.time()), batch_id),
    )


def results(database: sqlite3.Connection, batch_id: str, status: int) -> Any:
    """Results with this status in input order, as a cursor."""
    return database.execute(
        "SELECT result FROM batch_lines WHERE batch_id = ? AND status = ? ORDER BY line_no", (batch_id, status)
    )


def close_batch(database: sqlite3.Connection, batch: OpenBatch, output_id: str | None, error_id: str | None) -> None:
    outcome = batch.outcome or "completed"
    database.execute(
        f"UPDATE batches SET status = ?, {outcome}_at = ?, output_file_id = ?, error_file_id = ? WHERE id = ?",
        (outcome, int(time.time()), output_id, error_id, batch.id),
    )
    database.execute("DELETE FROM batch_lines WHERE batch_id = ?", (batch.id,))
    forget_salt(database, batch.id)
