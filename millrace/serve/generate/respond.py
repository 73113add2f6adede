"""Answers an HTTP request with generated text, whole or streamed, in any dialect."""

from __future__ import annotations

import logging
import time

from aiohttp import web

from millrace.errors import MillraceError
from millrace.serve.generate.choosing.beam_job import make_job
from millrace.serve.generate.early_stream import WriteError, begin_while_loading
from millrace.serve.generate.gate import enter
from millrace.serve.generate.grammars import check_grammar
from millrace.serve.generate.job import Job
from millrace.serve.generate.work import Prepare, Work, observe, until_done, whole_answer
from millrace.serve.http.app_keys import EXTRA_HEADERS, FINISH_REASON, MODEL, REQUEST_ID, TOKEN_COUNTS, TRACE
from millrace.serve.http.body import read_body
from millrace.serve.http.event_stream import SERVER_SENT_EVENTS, EventStream
from millrace.serve.http.ids import REQUEST_ID_HEADER
from millrace.serve.state import STATE, FrontState
from millrace.serve.tenancy.owner import owner_of

FLUSH_GRACE_S = 30.0
"""How long a client may take to read the rest of a finished stream."""

request_log = logging.getLogger("millrace.requests")


async def respond(request: web.Request, prepare: Prepare, write_error: WriteError) -> web.StreamResponse:
    """Read the body, translate it and answer it."""
    received = time.monotonic()
    data = await read_body(request, request.app[STATE].body_limit_bytes)
    return await respond_to(request, data, prepare, received, write_error)


async def respond_to(
    request: web.Request, data: bytes, prepare: Prepare, received: float, write_error: WriteError
) -> web.StreamResponse:
    """Translate a body and answer it. A stream whose model is being loaded begins early; then `write_error` makes the
    frames of errors that come before the answer's own."""
    early = await begin_while_loading(request, data, write_error)
    if early is None:
        return await answer(request, await prepare(request.app[STATE], data, received, owner_of(request)), received)
    try:
        if early.out.has_ended:
            return early.out.sent_response()
        work = await prepare(request.app[STATE], data, received, owner_of(request))
        return await answer(request, work, received, out=early.out)
    except MillraceError as error:
        return await early.end_with(request, error)
    finally:
        early.out.close()


async def answer(
    request: web.Request,
    work: Work,
    received: float,
    *,
    media_type: str = SERVER_SENT_EVENTS,
    out: EventStream | None = None,
) -> web.StreamResponse:
    """`out`: a stream that the caller has begun and closes."""
    state, begun = work.state, out
    await check_grammar(state, work.generation, owner_of(request))
    generation, reservation = enter(state, request, work.generation, received)
    job: Job | None = None
    try:
        if generation.stream and out is None:
            limit_bytes = state.config.server.stream_buffer_kb * 1024
            out = EventStream(
                request,
                request_id=request[REQUEST_ID],
                limit_bytes=limit_bytes,
                media_type=media_type,
                headers=request.get(EXTRA_HEADERS, {}),
            )
        job = make_job(state, generation, work.make_writer, out)
        job.request_id, job.path, job.owner = request[REQUEST_ID], request.path, owner_of(request)
        if out is not None:
            return await _stream(work, job, out)
        headers = {REQUEST_ID_HEADER: request[REQUEST_ID], "Server": "millrace", **work.headers}
        body = await whole_answer(work, job)
        return web.Response(body=body, headers=headers, content_type="application/json")
    finally:
        if out is not None and out is not begun:
            out.close()
        is_started = job is not None and job.is_started
        reservation.release(job.usage().total_tokens if job is not None and is_started else 0)
        if job is not None and is_started:
            _account(state, request, job, received)


async def _stream(work: Work, job: Job, out: EventStream) -> web.StreamResponse:
    job.start()
    await until_done(work.state, job)
    if work.conclude is not None and job.error is None:
        try:
            out.end(await work.conclude(job))
        except MillraceError as error:
            out.end(job.writer.error_frames(error))
    await out.finish(FLUSH_GRACE_S)
    return out.sent_response()


def _account(state: FrontState, request: web.Request, job: Job, received: float) -> None:
    """Count one request that reached the engine, and log it if `log_requests` is set."""
    metrics, now = state.metrics, time.monotonic()
    observe(state, job, received)
    if (trace := request.get(TRACE)) is not None:
        for number, finish in job.finishes.items():
            trace.add_sequence(number, finish, received, job.submitted_at)
    ended, usage = job.finish_reason, job.usage()
    request[FINISH_REASON], request[MODEL] = ended, state.model_name
    counts = (usage.prompt_tokens, usage.output_tokens, usage.cached_tokens, usage.reasoning_tokens)
    request[TOKEN_COUNTS] = counts
    if job.error is not None and job.out is not None and job.out.started:
        metrics.count_error(ended, job.error.status)  # An error before the stream began is counted with its answer.
    if ended == "abort":
        metrics.client_disconnects.inc()
    else:
        state.figures.e2e.observe(now - received)
    if state.config.observe.log_requests:
        request_log.info(
            "%s %s request_id=%s stream=%s prompt=%d cached=%d output=%d finish=%s total=%.3fs",
            request.path,
            job.generation.answer_id,
            request[REQUEST_ID],
            job.generation.stream,
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.output_tokens,
            ended,
            now - received,
        )
