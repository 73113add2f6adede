"""Runs one batch from its input file to its result files, at batch priority, with the same jobs as HTTP requests."""

from __future__ import annotations

import asyncio
import dataclasses
import sqlite3
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from millrace.errors import BadRequest, EngineUnavailable, MillraceError, Overloaded, RequestFailed
from millrace.serve.generate.fields.priority import BATCH
from millrace.serve.generate.work import Prepare, Work, unattended_answer
from millrace.serve.http.error_bodies import error_body
from millrace.serve.http.ids import new_id
from millrace.serve.state import FrontState
from millrace.serve.stored.batch_store import (
    FAILED,
    SUCCEEDED,
    BatchError,
    Line,
    OpenBatch,
    begin,
    close_batch,
    fail_validation,
    finalize,
    pending_lines,
    record,
    results,
)
from millrace.serve.stored.file_store import add_file, path_of

MAX_LINES = 50_000
MAX_ERRORS = 100
"""Errors listed for an invalid input file."""
RETRY_S = 1.0
"""Pause before a line is retried when the engine is overloaded or unavailable."""


class _Envelope(msgspec.Struct, forbid_unknown_fields=True):
    """A line of the input file."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


_envelope = msgspec.json.Decoder(_Envelope)


class BatchRun:
    """One batch, continued from its state in the database."""

    def __init__(self, state: FrontState, batch: OpenBatch, prepare: Prepare, slots: asyncio.Semaphore) -> None:
        self._state = state
        self._store = state.store
        self._batch = batch
        self._prepare = prepare
        self._slots = slots
        self._path = path_of(self._store, batch.input_file_id)
        self.stop = asyncio.Event()
        """Set to cancel the batch."""

    async def run(self) -> None:
        """Returns when the batch has ended, or early if the server drains; the next run then continues it."""
        batch = self._batch
        if batch.status == "validating" and not await self._validate():
            return
        if batch.status != "finalizing":
            outcome = "cancelled" if batch.status == "cancelling" else await self._run_lines()
            if outcome is None:
                return
            await self._store.run(self._fail_pending_lines, outcome)
            batch = self._batch = dataclasses.replace(batch, status="finalizing", outcome=outcome)
        await self._store.run(self._write_results)

    # ── validation ────────────────────────────────────────────────────────────────────────────────────────────────────
    async def _validate(self) -> bool:
        lines, errors = await self._store.in_thread(self._read_lines)
        if not lines and not errors:
            errors = [BatchError("empty_file", "The input file has no requests; write one JSON object per line.")]
        if errors:
            await self._store.run(fail_validation, self._batch.id, errors[:MAX_ERRORS])
            return False
        await self._store.run(begin, self._batch.id, lines)
        return True

    def _read_lines(self) -> tuple[list[Line], list[BatchError]]:
        lines: list[Line] = []
        errors: list[BatchError] = []
        seen: set[str] = set()
        try:
            for line_no, offset, data in self._raw_lines():
                if len(lines) == MAX_LINES:
                    text = f"The input file has more than {MAX_LINES} requests; split it."
                    return lines, [BatchError("too_many_requests", text, line=line_no)]
                try:
                    custom_id = self._check(data, seen)
                except BadRequest as error:
                    errors.append(BatchError(error.code or "invalid_request", error.message, error.param, line_no))
                else:
                    seen.add(custom_id)
                    lines.append(Line(line_no, custom_id, offset, len(data)))
        except FileNotFoundError:
            errors = [BatchError("file_not_found", "The input file has been deleted; upload it again.")]
        return lines, errors

    def _raw_lines(self) -> Iterator[tuple[int, int, bytes]]:
        """Number (from 1), byte offset and bytes of each line that is not blank."""
        offset = 0
        with self._path.open("rb") as file:
            for line_no, data in enumerate(file, 1):
                if data.strip():
                    yield line_no, offset, data
                offset += len(data)

    def _check(self, data: bytes, seen: set[str]) -> str:
        """The line's custom_id. Raises if the envelope is invalid; the body is checked when the line is run."""
        try:
            line = _envelope.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadRequest(f"This line is not a valid request: {error}.", code="invalid_json_line") from None
        if line.custom_id in seen:
            raise BadRequest(
                f"custom_id {line.custom_id[:80]!r} is used twice; each must be unique.",
                param="custom_id",
                code="duplicate_custom_id",
            )
        if line.method != "POST":
            raise BadRequest(
                f"method is {line.method[:80]!r}; it must be 'POST'.", param="method", code="invalid_method"
            )
        if line.url != self._batch.endpoint:
            raise BadRequest(
                f"url is {line.url[:80]!r}; this batch's endpoint is {self._batch.endpoint!r}.",
                param="url",
                code="mismatched_url",
            )
        return line.custom_id

    # ── the lines ─────────────────────────────────────────────────────────────────────────────────────────────────────
    async def _run_lines(self) -> str | None:
        """Answer the pending lines. Returns the batch's outcome, or None if the server drains first."""
        pending = iter(await self._store.run(pending_lines, self._batch.id))
        workers = [asyncio.create_task(self._work(pending)) for _ in range(self._state.config.server.batch_lines)]
        whole = asyncio.gather(*workers)
        stopped = asyncio.create_task(self.stop.wait())
        left_s = self._batch.expires_at - time.time()
        try:
            await asyncio.wait((whole, stopped), timeout=max(0.0, left_s), return_when=asyncio.FIRST_COMPLETED)
            if whole.done():
                return "completed" if all(whole.result()) else None
            return "cancelled" if self.stop.is_set() else "expired"
        finally:
            for task in (*workers, stopped):
                task.cancel()
            await asyncio.gather(*workers, whole, stopped, return_exceptions=True)

    async def _work(self, pending: Iterator[Line]) -> bool:
        """Answer lines until none is left. False if the server drains."""
        for line in pending:
            async with self._slots:
                if not await self._answer_line(line):
                    return False
        return not self._state.draining

    async def _answer_line(self, line: Line) -> bool:
        while not self._state.draining:
            try:
                status, result, tokens = await self._result(line)
            except (Overloaded, EngineUnavailable):
                await asyncio.sleep(RETRY_S)
                continue
            await self._store.run(record, self._batch.id, line.line_no, status, result, tokens)
            return True
        return False

    async def _result(self, line: Line) -> tuple[int, bytes, tuple[int, int, int]]:
        request_id, received, tokens = new_id("req-"), time.monotonic(), (0, 0, 0)
        try:
            work = await self._prepared(line)
            body, usage = await unattended_answer(
                work, self._batch.owner, request_id, self._batch.endpoint, received, salt=self._batch.salt
            )
            code = 200
            tokens = (usage.prompt_tokens, usage.cached_tokens, usage.output_tokens)
        except (Overloaded, EngineUnavailable):
            raise
        except MillraceError as error:
            body, code = error_body(error), error.status
        response = {"status_code": code, "request_id": request_id, "body": msgspec.Raw(body)}
        return SUCCEEDED if code == 200 else FAILED, _result_line(line.custom_id, response, None), tokens

    async def _prepared(self, line: Line) -> Work:
        body = bytes(_envelope.decode(await self._store.in_thread(lambda: self._read(line))).body)
        work = await self._prepare(self._state, body, time.monotonic(), self._batch.owner)
        generation = work.generation
        if generation.stream:
            raise BadRequest(
                "'stream' is true, but a batch writes its answers to a file; set it to false.", param="stream"
            )
        deadline = time.monotonic() + self._batch.expires_at - time.time()
        if _has_timeout(body):
            deadline = min(deadline, generation.deadline)
        generation = dataclasses.replace(generation, asked_priority=BATCH, deadline=deadline)
        return dataclasses.replace(work, generation=generation)

    def _read(self, line: Line) -> bytes:
        try:
            with self._path.open("rb") as file:
                file.seek(line.offset)
                return file.read(line.length)
        except FileNotFoundError:
            raise RequestFailed("The batch's input file was deleted before this line was run.") from None

    # ── the end ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def _fail_pending_lines(self, database: sqlite3.Connection, outcome: str) -> None:
        if outcome != "completed":
            verb = "was cancelled" if outcome == "cancelled" else "expired"
            error = {"code": f"batch_{outcome}", "message": f"The batch {verb} before this request was answered."}
            for line in pending_lines(database, self._batch.id):
                record(database, self._batch.id, line.line_no, FAILED, _result_line(line.custom_id, None, error))
        finalize(database, self._batch.id, outcome)

    def _write_results(self, database: sqlite3.Connection) -> None:
        """Files first, then the row that refers to them: after a crash in between, both are written again."""
        batch = self._batch
        ids = [self._write_file(database, status, name) for status, name in ((SUCCEEDED, "output"), (FAILED, "error"))]
        close_batch(database, batch, *ids)

    def _write_file(self, database: sqlite3.Connection, status: int, name: str) -> str | None:
        file_id = f"file-{self._batch.id.removeprefix('batch_')}-{name}"
        path = path_of(self._store, file_id)
        partial = path.with_name(f".{file_id}.part")
        with partial.open("wb") as file:
            for row in results(database, self._batch.id, status):
                file.write(row["result"])
            size = file.tell()
        if size == 0:
            partial.unlink()
            return None
        partial.replace(path)
        filename = f"{self._batch.id}_{name}.jsonl"
        add_file(database, file_id, self._batch.owner, filename, "batch_output", size, self._batch.output_lives_s)
        return file_id


def _has_timeout(body: bytes) -> bool:
    """True if the line sets its own deadline; otherwise the batch's expiry is its deadline."""
    return msgspec.json.decode(body, type=_Timeout).timeout is not None


class _Timeout(msgspec.Struct):
    timeout: float | None = None


def _result_line(custom_id: str, response: dict[str, Any] | None, error: dict[str, str] | None) -> bytes:
    line = {"id": new_id("batch_req_"), "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(line) + b"\n"
