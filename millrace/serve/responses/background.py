"""Responses made with `background`, generated while no client waits."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from functools import partial

import msgspec

from millrace.errors import EngineUnavailable, MillraceError, Overloaded
from millrace.serve.generate.work import unattended_answer
from millrace.serve.responses.event_log import StoredStream, fail_without_events, flush, forget, write_events
from millrace.serve.responses.schemas import ResponseAnswer
from millrace.serve.responses.store import OpenResponse, end_response, mark_started, open_responses
from millrace.serve.responses.translate import prepare_response
from millrace.serve.responses.write import failed
from millrace.serve.state import FrontState
from millrace.serve.stored.background import BackgroundTask
from millrace.serve.stored.batch_run import RETRY_S


def open_tasks(state: FrontState, database: sqlite3.Connection) -> list[BackgroundTask]:
    """The responses that are not finished. Runs inside one transaction."""
    return [BackgroundTask(response.id, partial(_run, state, response)) for response in open_responses(database)]


async def _run(state: FrontState, response: OpenResponse) -> None:
    opening = msgspec.structs.replace(response.answer, status="in_progress")
    await state.store.run(mark_started, opening)
    while not state.draining:
        try:
            await _generate(state, response, opening)
            return
        except (EngineUnavailable, Overloaded):
            await asyncio.sleep(RETRY_S)
        except MillraceError as error:
            final = failed(opening, error)
            await state.store.run(fail_without_events, final)
            await state.store.run(end_response, final)
            return


async def _generate(state: FrontState, response: OpenResponse, opening: ResponseAnswer) -> None:
    """Generate from the beginning. The events of a streamed response are stored as they form."""
    received = time.monotonic()
    work = await prepare_response(state, response.request, received, response.owner, queued=opening)
    about = (response.owner, response.id, "/v1/responses", received)
    if not work.generation.stream:
        await unattended_answer(work, *about, salt=response.salt)
        return
    stream = StoredStream()
    await state.store.run(forget, response.id)
    writing = asyncio.create_task(write_events(state, response.id, stream))
    try:
        last, _ = await unattended_answer(work, *about, out=stream, salt=response.salt)
        stream.end(last)
    finally:
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        await flush(state, response.id, stream)
