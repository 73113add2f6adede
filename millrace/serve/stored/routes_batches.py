"""/v1/batches: create, list, describe, cancel. `background` runs the batches."""

from __future__ import annotations

import sqlite3
from typing import Annotated, Literal

from aiohttp import web

from millrace.errors import BadRequest
from millrace.serve.generate.checks import check_metadata
from millrace.serve.http.body import BodyDecoder, read_body
from millrace.serve.http.json_answer import json_answer
from millrace.serve.http.queries import check_query, page_of
from millrace.serve.http.schema import Strict, described
from millrace.serve.state import STATE
from millrace.serve.stored.background import BACKGROUND
from millrace.serve.stored.batch_store import BatchAnswer, add_batch, cancel_batch, get_batch, list_batches
from millrace.serve.stored.file_store import get_file
from millrace.serve.stored.kept_salts import keep_salt, salt_in
from millrace.serve.stored.routes_files import checked_lifetime_s
from millrace.serve.tenancy.owner import owner_of


class OutputExpiry(Strict, kw_only=True):
    anchor: Literal["created_at"]
    seconds: Annotated[int, described("From an hour to 30 days.", minimum=3600, maximum=2_592_000)]


class BatchRequest(Strict, kw_only=True):
    """The body of POST /v1/batches."""

    input_file_id: Annotated[
        str, described("A file of requests, one JSON object per line, uploaded with purpose `batch`.")
    ]
    endpoint: Annotated[
        str,
        described(
            "The endpoint of all requests in the file.",
            enum=["/v1/chat/completions", "/v1/completions", "/v1/responses"],
        ),
    ]
    completion_window: Literal["24h"]
    metadata: Annotated[dict[str, str] | None, described("Labels, returned with the batch.")] = None
    output_expires_after: OutputExpiry | None = None


_batch = BodyDecoder(BatchRequest)


async def create(request: web.Request) -> web.Response:
    state, owner = request.app[STATE], owner_of(request)
    body = _batch.decode(await read_body(request, state.body_limit_bytes))
    _check_endpoint(body.endpoint, list(request.app[BACKGROUND].endpoints))
    check_metadata(body.metadata)
    batch = await state.store.run(_add, body, owner, state.model_name, salt_in(request))
    request.app[BACKGROUND].wake()
    return json_answer(request, batch)


def _check_endpoint(endpoint: str, known: list[str]) -> None:
    if endpoint not in known:
        raise BadRequest(
            f"endpoint is {endpoint[:80]!r}; this server runs batches for {', '.join(known)}.",
            param="endpoint",
            code="invalid_value",
        )


def _add(database: sqlite3.Connection, body: BatchRequest, owner: str, model: str, salt: str) -> BatchAnswer:
    file = get_file(database, body.input_file_id, owner, param="input_file_id")
    if file.purpose != "batch":
        raise BadRequest(
            f"The file {file.id!r} was uploaded with purpose {file.purpose!r}; a batch needs 'batch'.",
            param="input_file_id",
        )
    expiry = body.output_expires_after
    lives_s = None if expiry is None else checked_lifetime_s(expiry.anchor, expiry.seconds, "output_expires_after")
    batch = add_batch(database, owner, body.endpoint, file.id, body.metadata, lives_s, model)
    keep_salt(database, batch.id, salt)
    return batch


async def listing(request: web.Request) -> web.Response:
    check_query(request, ("limit", "after"))
    page = page_of(request, most=100, usual=20)
    return json_answer(request, await request.app[STATE].store.run(list_batches, owner_of(request), page))


async def describe(request: web.Request) -> web.Response:
    batch_id, owner = request.match_info["batch_id"], owner_of(request)
    return json_answer(request, await request.app[STATE].store.run(get_batch, batch_id, owner))


async def cancel(request: web.Request) -> web.Response:
    batch_id, owner = request.match_info["batch_id"], owner_of(request)
    batch = await request.app[STATE].store.run(cancel_batch, batch_id, owner)
    request.app[BACKGROUND].wake()
    return json_answer(request, batch)
