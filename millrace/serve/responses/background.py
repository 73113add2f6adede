"""Responses made with `background`, generated while no client waits."""

from __future__ import annotations

import asyncio
import dataclasses
import sqlite3
import time
from functools import partial

import msgspec

from millrace.errors import EngineUnavailable, MillraceError, Overloaded
from millrace.serve.generate.work import unattended_answer
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
            received = time.monotonic()
            work = await prepare_response(state, response.request, received, response.owner, queued=opening)
            work = dataclasses.replace(work, generation=dataclasses.replace(work.generation, stream=False))
            await unattended_answer(state, work, response.owner, response.id, "/v1/responses", received)
            return
        except (EngineUnavailable, Overloaded):
            await asyncio.sleep(RETRY_S)
        except MillraceError as error:
            await state.store.run(end_response, failed(opening, error))
            return
