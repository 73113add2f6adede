"""The two routes that generate text."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial

from aiohttp import web

from millrace.errors import DeadlineExceeded
from millrace.serve.body import BodyDecoder, read_body
from millrace.serve.chat import chat_generation, overflow_names
from millrace.serve.completions import completion_generation
from millrace.serve.event_stream import EventStream
from millrace.serve.gate import enter
from millrace.serve.generation import Generation
from millrace.serve.ids import REQUEST_ID_HEADER
from millrace.serve.job import DEADLINE_SLACK_S, Job, Shape
from millrace.serve.keys import EXTRA_HEADERS, FINISH_WORD, REQUEST_ID, STATE, USAGE
from millrace.serve.schemas import ChatRequest, CompletionRequest
from millrace.serve.shape_chat import ChatShape
from millrace.serve.shape_completions import CompletionShape
from millrace.serve.state import FrontState

FLUSH_GRACE_S = 30.0
"""How long a client may take to read the rest of a stream that has ended."""

request_log = logging.getLogger("millrace.requests")

_chat = BodyDecoder(ChatRequest)
_completion = BodyDecoder(CompletionRequest)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    state, received = request.app[STATE], time.monotonic()
    body = _chat.decode(await read_body(request, state.body_limit_bytes))
    await state.await_engine()
    generation = await chat_generation(state, body, received)
    shape = partial(ChatShape, limit_names=overflow_names(body))
    return await _answer(state, request, generation, shape, received)


async def completions(request: web.Request) -> web.StreamResponse:
    state, received = request.app[STATE], time.monotonic()
    body = _completion.decode(await read_body(request, state.body_limit_bytes))
    await state.await_engine()
    generation = await completion_generation(state, body, received)
    return await _answer(state, request, generation, CompletionShape, received)


async def _answer(
    state: FrontState,
    request: web.Request,
    generation: Generation,
    make_shape: Callable[[Job], Shape],
    received: float,
) -> web.StreamResponse:
    generation, reservation = enter(state, request, generation, received)
    out: EventStream | None = None
    submitted: Job | None = None
    try:
        if generation.stream:
            limit_bytes = state.config.server.stream_buffer_kb * 1024
            out = EventStream(
                request,
                request_id=request[REQUEST_ID],
                limit_bytes=limit_bytes,
                headers=request.get(EXTRA_HEADERS, {}),
            )
        job = Job(state, generation, make_shape, out)
        job.start()
        submitted = job
        await _until_done(state, job)
        if out is not None:
            await out.finish(FLUSH_GRACE_S)
            return out.sent_response()
        headers = {REQUEST_ID_HEADER: request[REQUEST_ID], "Server": "millrace"}
        return web.Response(body=job.body(), headers=headers, content_type="application/json")
    finally:
        if out is not None:
            out.close()
        reservation.release(submitted.usage().total_tokens if submitted is not None else 0)
        if submitted is not None:
            _account(state, request, submitted, received)


async def _until_done(state: FrontState, job: Job) -> None:
    """Wait for the job's end. Whoever stops waiting (the client left: cancelled) takes its sequences back."""
    loop = asyncio.get_running_loop()
    patience_s = job.generation.deadline - time.monotonic() + DEADLINE_SLACK_S
    timer = loop.call_later(patience_s, job.fail, DeadlineExceeded("The engine did not answer before the deadline."))
    state.jobs.add(job)
    try:
        await job.done
    finally:
        timer.cancel()
        state.jobs.discard(job)
        job.close()


def _account(state: FrontState, request: web.Request, job: Job, received: float) -> None:
    """Count and, when asked to, log one request that reached the engine."""
    metrics, now = state.metrics, time.monotonic()
    before_submit_s = job.submitted_at - received
    for choice in job.choices:
        if choice.finish is not None:
            metrics.observe_sequence(choice.finish, before_submit_s)
    ended = job.finish_word
    request[FINISH_WORD] = ended
    request[USAGE] = job.usage()
    if ended == "abort":
        metrics.client_disconnects.inc()
    else:
        metrics.e2e.observe(now - received)
    if state.config.observe.log_requests:
        usage = job.usage()
        request_log.info(
            "%s %s request_id=%s stream=%s prompt=%d cached=%d output=%d finish=%s total=%.3fs",
            request.path,
            job.generation.answer_id,
            request[REQUEST_ID],
            job.generation.stream,
            usage.prompt_tokens,
            usage.prompt_tokens_details.cached_tokens,
            usage.completion_tokens,
            ended,
            now - received,
        )
