"""/v1/files: upload, list, describe, download, delete."""

from __future__ import annotations

import asyncio
import difflib
import re
from collections.abc import Awaitable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestPayloadError

from millrace.errors import BadRequest, BodyTooLarge, RequestTimeout, UnsupportedMediaType
from millrace.serve.database import Store
from millrace.serve.http.app_keys import REQUEST_ID
from millrace.serve.http.body import BODY_TIMEOUT_S
from millrace.serve.http.ids import REQUEST_ID_HEADER
from millrace.serve.http.json_answer import json_answer
from millrace.serve.http.queries import MAX_PAGE, check_query, page_of
from millrace.serve.state import STATE, FrontState
from millrace.serve.stored.file_store import add_file, delete_file, get_file, list_files, new_file_id, path_of
from millrace.serve.tenancy.owner import owner_of

_T = TypeVar("_T")

UPLOAD_PATH = "/v1/files"
PURPOSES = ("batch", "assistants", "fine-tune", "vision", "user_data", "evals")
"""Accepted purposes. This server uses only files for `batch`."""
_FIELDS = ("file", "purpose", "expires_after[anchor]", "expires_after[seconds]")
_MAX_FIELD_BYTES = 1024
_CHUNK_BYTES = 1 << 18
_LIFETIME_RANGE_S = (3600, 2_592_000)


@dataclass(slots=True)
class _Upload:
    """A form being received. The file is written to a temporary name and renamed once the form is valid."""

    file_id: str = field(default_factory=new_file_id)
    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None
    size: int = 0


# ── upload ────────────────────────────────────────────────────────────────────────────────────────────────────────────
async def upload(request: web.Request) -> web.Response:
    state = request.app[STATE]
    check_upload(request, state)
    store, taken = state.store, _Upload()
    await store.run(lambda database: None)  # Creates the directory.
    part_path = store.files / f".{taken.file_id}.part"
    try:
        await _read_form(request, state, taken, part_path)
        purpose, lives_s = _checked(taken)

        def keep(database: Any) -> Any:
            part_path.replace(path_of(store, taken.file_id))
            name = taken.filename or taken.file_id
            return add_file(database, taken.file_id, owner_of(request), name, purpose, taken.size, lives_s)

        return json_answer(request, await store.run(keep))
    finally:
        await store.in_thread(lambda: part_path.unlink(missing_ok=True))


def check_upload(request: web.Request, state: FrontState) -> None:
    """Refuse what the headers alone show to be wrong, before the form is read."""
    _check_size(request.content_length or 0, state)
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedMediaType(f"The body has Content-Encoding {encoding[:80]!r}; send the form uncompressed.")
    if request.content_type.lower() != "multipart/form-data":
        raise BadRequest(
            f"The body has Content-Type {request.content_type[:80]!r}; send multipart/form-data with 'purpose' and"
            " 'file'.",
            code="unsupported_media_type",
        )


def _check_size(num_bytes: int, state: FrontState) -> None:
    limit = state.config.server.file_limit_mb * 1024 * 1024
    if num_bytes > limit:
        raise BodyTooLarge(
            f"The upload has at least {num_bytes} bytes; the limit is {limit}."
            " Split the file, or start the server with a larger --file-limit-mb."
        )


async def _read_form(request: web.Request, state: FrontState, taken: _Upload, path: Path) -> None:
    try:
        reader = await request.multipart()
        while part := await _in_time(reader.next()):
            if not isinstance(part, BodyPartReader):
                raise BadRequest("The form contains a nested form; send plain fields.", code="malformed_form")
            await _read_part(state, taken, part, path)
    except TimeoutError:
        raise RequestTimeout(f"No data of the upload arrived for {BODY_TIMEOUT_S:g} s.") from None
    except (ValueError, AssertionError, RequestPayloadError, HttpProcessingError) as error:
        what = " ".join(str(error).split())[:80]
        raise BadRequest(f"The body is not well-formed multipart/form-data: {what}", code="malformed_form") from None


async def _in_time(piece: Awaitable[_T]) -> _T:
    async with asyncio.timeout(BODY_TIMEOUT_S):
        return await piece


async def _read_part(state: FrontState, taken: _Upload, part: BodyPartReader, path: Path) -> None:
    name = part.name or ""
    if name not in _FIELDS:
        close = difflib.get_close_matches(name, _FIELDS, n=1, cutoff=0.6)
        hint = f"Did you mean '{close[0]}'?" if close else "Remove it."
        raise BadRequest(
            f"{name[:80]!r} is not a field of this form. {hint}", param=name[:200] or None, code="unknown_field"
        )
    if name in taken.fields or (name == "file" and taken.filename is not None):
        raise BadRequest(f"The form contains '{name}' twice.", param=name)
    if name == "file":
        taken.filename = part.filename or "upload"
        await _write_file(state, taken, part, path)
        return
    data = bytearray()
    while chunk := await _in_time(part.read_chunk(_MAX_FIELD_BYTES)):
        data += chunk
        if len(data) > _MAX_FIELD_BYTES:
            raise BadRequest(f"'{name}' is longer than {_MAX_FIELD_BYTES} bytes.", param=name)
    taken.fields[name] = data.decode("utf-8", "replace")


async def _write_file(state: FrontState, taken: _Upload, part: BodyPartReader, path: Path) -> None:
    store = state.store
    file: IO[bytes] = await store.in_thread(lambda: path.open("wb"))
    try:
        while chunk := await _in_time(part.read_chunk(_CHUNK_BYTES)):
            taken.size += len(chunk)
            _check_size(taken.size, state)
            await _write(store, file, chunk)
    finally:
        await store.in_thread(file.close)


async def _write(store: Store, file: IO[bytes], chunk: bytes | bytearray) -> None:
    await store.in_thread(lambda: file.write(chunk))


def _checked(taken: _Upload) -> tuple[str, int | None]:
    """The purpose, and the file's lifetime in seconds (None: no limit)."""
    fields = taken.fields
    for name, is_there in (("file", taken.filename is not None), ("purpose", "purpose" in fields)):
        if not is_there:
            raise BadRequest(f"'{name}' is required.", param=name, code="missing_field")
    purpose = fields["purpose"]
    if purpose not in PURPOSES:
        raise BadRequest(
            f"purpose is {purpose[:80]!r}; it must be one of {', '.join(PURPOSES)}.",
            param="purpose",
            code="invalid_value",
        )
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return purpose, None
    return purpose, checked_lifetime_s(anchor, int(seconds) if seconds and re.fullmatch(r"\d{1,9}", seconds) else None)


def checked_lifetime_s(anchor: str | None, seconds: int | None, name: str = "expires_after") -> int:
    if anchor != "created_at":
        raise BadRequest(f"{name}.anchor is {anchor!r}; it must be 'created_at'.", param=f"{name}.anchor")
    if seconds is None or not _LIFETIME_RANGE_S[0] <= seconds <= _LIFETIME_RANGE_S[1]:
        raise BadRequest(
            f"{name}.seconds is {seconds}; send an integer from {_LIFETIME_RANGE_S[0]} to {_LIFETIME_RANGE_S[1]}.",
            param=f"{name}.seconds",
        )
    return seconds


# ── the rest ──────────────────────────────────────────────────────────────────────────────────────────────────────────
async def listing(request: web.Request) -> web.Response:
    check_query(request, ("purpose", "limit", "order", "after"))
    page, purpose = page_of(request, most=MAX_PAGE, usual=MAX_PAGE), request.query.get("purpose")
    state, owner = request.app[STATE], owner_of(request)
    return json_answer(request, await state.store.run(list_files, owner, page, purpose))


async def describe(request: web.Request) -> web.Response:
    file_id, owner = request.match_info["file_id"], owner_of(request)
    return json_answer(request, await request.app[STATE].store.run(get_file, file_id, owner))


async def delete(request: web.Request) -> web.Response:
    store, file_id, owner = request.app[STATE].store, request.match_info["file_id"], owner_of(request)
    return json_answer(request, await store.run(delete_file, store, file_id, owner))


async def content(request: web.Request) -> web.StreamResponse:
    store, owner = request.app[STATE].store, owner_of(request)
    file = await store.run(get_file, request.match_info["file_id"], owner)
    name = re.sub(r"[^\w.-]", "_", file.filename, flags=re.ASCII)
    headers = {
        REQUEST_ID_HEADER: request[REQUEST_ID],
        "Server": "millrace",
        "Content-Type": "application/octet-stream",
        "Content-Disposition": f'attachment; filename="{name}"',
    }
    return web.FileResponse(path_of(store, file.id), headers=headers)
