"""/v1/responses: create (whole, streamed, in the background), retrieve, delete, cancel, input items, token count."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Mapping
from functools import partial

import msgspec
from aiohttp import web

from millrace.errors import BadRequest, MillraceError
from millrace.serve.generate.fields.session import with_session
from millrace.serve.generate.heartbeat import StreamForm
from millrace.serve.generate.respond import respond_to
from millrace.serve.generate.resuming.request import resumable_of
from millrace.serve.http.app_keys import LABELS, REQUEST_ID
from millrace.serve.http.body import read_body
from millrace.serve.http.event_stream import NO_HEADERS
from millrace.serve.http.ids import REQUEST_ID_HEADER
from millrace.serve.http.json_answer import encode, json_answer
from millrace.serve.http.queries import check_query, page_of
from millrace.serve.responses.event_log import follow
from millrace.serve.responses.included import check_include
from millrace.serve.responses.references import with_items
from millrace.serve.responses.schemas import (
    InputTokensAnswer,
    ResponseAnswer,
    ResponseDeleted,
    ResponsesRequest,
)
from millrace.serve.responses.store import (
    add_response,
    cancel_response,
    delete_response,
    get_response,
    input_items,
)
from millrace.serve.responses.translate import count_input_tokens, decode_response, opening_answer, prepare_response
from millrace.serve.responses.translate import input_items as read_input
from millrace.serve.state import STATE, FrontState
from millrace.serve.stored.background import BACKGROUND
from millrace.serve.stored.kept_salts import keep_salt, salt_in
from millrace.serve.tenancy.owner import owner_of


async def create(request: web.Request) -> web.StreamResponse:
    state, received, owner = request.app[STATE], time.monotonic(), owner_of(request)
    data = with_session(request, await read_body(request, state.body_limit_bytes))
    body = decode_response(data)
    if body.client_metadata:
        request[LABELS] = body.client_metadata
    if body.background:
        _check_background(body)
        # Validate now, while the client waits for the answer.
        work = await prepare_response(state, data, received, owner)
        queued = await _queue(work.state, data, body, owner, work.generation.answer_id, salt_in(request))
        request.app[BACKGROUND].wake()
        if body.stream:
            return await _follow(request, queued.id, owner, -1, work.headers)
        answer = json_answer(request, queued)
        answer.headers.update(work.headers)
        return answer
    resumable = resumable_of(request, state)
    response_id = None if resumable is None else resumable.id_of("resp_")
    return await respond_to(request, data, partial(prepare_response, response_id=response_id), received, STREAM)


def stream_error(error: MillraceError) -> bytes:
    """An `error` event, for a stream without a response."""
    said = {"code": error.code, "message": error.message, "param": error.param}
    return b"event: error\ndata: %b\n\n" % encode({"type": "error", "sequence_number": 0, **said})


STREAM = StreamForm(stream_error, ping_follows_preamble=True)


def _check_background(body: ResponsesRequest) -> None:
    if body.store is False:
        raise BadRequest(
            "'background' is true and 'store' is false, but a background response must be stored; set store to true.",
            param="store",
        )


async def _queue(
    state: FrontState, data: bytes, body: ResponsesRequest, owner: str, response_id: str, salt: str
) -> ResponseAnswer:
    queued = msgspec.structs.replace(opening_answer(state, body, response_id), status="queued")
    items = read_input(await with_items(state, body.input, owner))

    def add(database: sqlite3.Connection) -> None:
        add_response(database, queued, owner, items, data)
        keep_salt(database, queued.id, salt)

    await state.store.run(add)
    return queued


async def retrieve(request: web.Request) -> web.StreamResponse:
    check_query(request, ("include", "stream", "starting_after", "include_obfuscation"))
    if request.query.get("include_obfuscation", "false").lower() != "false":
        raise BadRequest(
            "include_obfuscation is not supported yet; remove it.",
            param="include_obfuscation",
            code="unsupported_parameter",
        )
    check_include(request)
    response_id, owner = request.match_info["response_id"], owner_of(request)
    if _is_streamed(request):
        return await _follow(request, response_id, owner, _starting_after(request))
    return json_answer(request, await request.app[STATE].store.run(get_response, response_id, owner))


def _is_streamed(request: web.Request) -> bool:
    value = request.query.get("stream", "false").lower()
    if value not in ("true", "false"):
        raise BadRequest(f"stream is {value[:80]!r}; it must be true or false.", param="stream")
    if value == "false" and "starting_after" in request.query:
        raise BadRequest("starting_after needs stream=true; add it.", param="starting_after")
    return value == "true"


def _starting_after(request: web.Request) -> int:
    value = request.query.get("starting_after", "")
    if value and not (value.isascii() and value.isdigit() and len(value) <= 9):
        raise BadRequest(f"starting_after is {value[:80]!r}; send the number of an event.", param="starting_after")
    return int(value) if value else -1


async def _follow(
    request: web.Request, response_id: str, owner: str, starting_after: int, further: Mapping[str, str] = NO_HEADERS
) -> web.StreamResponse:
    """Send the stored events of a background response, and those to come. A client that goes away loses nothing."""
    events = follow(request.app[STATE], response_id, owner, starting_after)
    first = await anext(events, b"")  # Until here an error is a plain response.
    headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "Server": "millrace"}
    answer = web.StreamResponse(headers={**headers, **further, REQUEST_ID_HEADER: request[REQUEST_ID]})
    await answer.prepare(request)
    await answer.write(first)
    try:
        async for more in events:
            await answer.write(more)
    except MillraceError as error:  # Such as a response that is deleted while it is read.
        await answer.write(stream_error(error))
    await answer.write_eof()
    return answer


async def delete(request: web.Request) -> web.Response:
    response_id, owner = request.match_info["response_id"], owner_of(request)
    await request.app[STATE].store.run(delete_response, response_id, owner)
    request.app[BACKGROUND].wake()
    return json_answer(request, ResponseDeleted(response_id, "response", True))


async def cancel(request: web.Request) -> web.Response:
    response_id, owner = request.match_info["response_id"], owner_of(request)
    body = await request.app[STATE].store.run(cancel_response, response_id, owner)
    request.app[BACKGROUND].wake()
    return json_answer(request, body)


async def list_input_items(request: web.Request) -> web.Response:
    check_query(request, ("limit", "order", "after", "include"))
    check_include(request)
    page = page_of(request, most=100, usual=20)
    response_id, owner = request.match_info["response_id"], owner_of(request)
    return json_answer(request, await request.app[STATE].store.run(input_items, response_id, owner, page))


async def count_tokens(request: web.Request) -> web.Response:
    state = request.app[STATE]
    data = await read_body(request, state.body_limit_bytes)
    num_tokens = await count_input_tokens(state, data, owner_of(request))
    return json_answer(request, InputTokensAnswer("response.input_tokens", num_tokens))
