"""Answers an HTTP request with generated text, whole or streamed, in any dialect."""

from __future__ import annotations

import logging
import time

from aiohttp import web

from millrace.errors import MillraceError, RequestFailed
from millrace.serve.fetching.wire import FETCH_HEADER, FROM_HEADER
from millrace.serve.generate.choosing.beam_job import make_job
from millrace.serve.generate.fetch import fetch_prefix
from millrace.serve.generate.fields.session import with_session
from millrace.serve.generate.gate import enter
from millrace.serve.generate.grammars import check_grammar
from millrace.serve.generate.heartbeat import FLUSH_GRACE_S, Heartbeat, StreamForm
from millrace.serve.generate.job import Job
from millrace.serve.generate.resuming.prepare import prepared
from millrace.serve.generate.resuming.request import resumable_of
from millrace.serve.generate.work import Prepare, Work, observe, until_done, whole_answer
from millrace.serve.http.app_keys import FINISH_REASON, MODEL, REQUEST_ID, STREAM_STATUS, TOKEN_COUNTS, TRACE
from millrace.serve.http.body import read_body
from millrace.serve.http.event_stream import EventStream
from millrace.serve.http.ids import REQUEST_ID_HEADER
from millrace.serve.state import STATE, FrontState
from millrace.serve.tenancy.owner import owner_of

log = logging.getLogger("millrace.serve")
request_log = logging.getLogger("millrace.requests")


async def respond(request: web.Request, prepare: Prepare, form: StreamForm | None) -> web.StreamResponse:
    """Read the body, translate it and answer it. `form`: None if answers are never streamed."""
    received = time.monotonic()
    data = with_session(request, await read_body(request, request.app[STATE].body_limit_bytes))
    return await respond_to(request, data, prepare, received, form)


async def respond_to(
    request: web.Request, data: bytes, prepare: Prepare, received: float, form: StreamForm | None
) -> web.StreamResponse:
    """Translate a body and answer it."""
    heartbeat = None if form is None else Heartbeat(request, data, form)
    try:
        work = await prepare(request.app[STATE], data, received, owner_of(request))
        return await _answer(request, work, received, heartbeat)
    except MillraceError as error:
        if heartbeat is None or not heartbeat.has_begun:
            raise
        return await heartbeat.end_with(error)
    except Exception as error:
        if heartbeat is None or not heartbeat.has_begun or isinstance(error, ConnectionError):
            raise
        log.error("Request %s failed.", request[REQUEST_ID], exc_info=error)
        return await heartbeat.end_with(RequestFailed("The server failed on this request; see the server's log."))
    finally:
        if heartbeat is not None:
            heartbeat.stop()


async def _answer(request: web.Request, work: Work, received: float, heartbeat: Heartbeat | None) -> web.StreamResponse:
    state, job = work.state, None
    await check_grammar(state, work.generation, owner_of(request))
    generation, reservation = enter(state, request, prepared(work.generation, resumable_of(request, state)), received)
    try:
        if FROM_HEADER in request.headers and (fetched := await fetch_prefix(state, request, generation)):
            work.headers[FETCH_HEADER] = fetched
        out = heartbeat.stream(work.headers) if heartbeat is not None and generation.stream else None
        job = make_job(state, generation, work.make_writer, out)
        job.request_id, job.path, job.owner = request[REQUEST_ID], request.path, owner_of(request)
        if heartbeat is not None and out is not None:
            heartbeat.write_error = job.writer.error_frames
            return await _stream(work, job, out)
        body = await whole_answer(work, job)  # It may add headers.
        headers = {REQUEST_ID_HEADER: request[REQUEST_ID], "Server": "millrace", **work.headers}
        return web.Response(body=body, headers=headers, content_type="application/json")
    finally:
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
        request[STREAM_STATUS] = job.error.status
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
